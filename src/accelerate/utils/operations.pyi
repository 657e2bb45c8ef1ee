from accelerate.devices import is_torch_distributed_available as is_torch_distributed_available
from accelerate.nested import (
    TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE,
    TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT,
    get_shape as get_shape,
    is_torch_xpu_tensor as is_torch_xpu_tensor,
)
from accelerate.ops import (
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    DistributedOperationException as DistributedOperationException,
    chained_operation as chained_operation,
    gather_tensor_shape as gather_tensor_shape,
    verify_operation as verify_operation,
)
from accelerate.state import AcceleratorState as AcceleratorState, PartialState as PartialState
from accelerate.utils import *
