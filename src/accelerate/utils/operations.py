"""Old import path of nested structures and collectives."""

from accelerate.base import (
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
    DistributedType as DistributedType,
    is_torch_version as is_torch_version,
)
from accelerate.devices import (
    is_npu_available as is_npu_available,
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_xla_available as is_torch_xla_available,
)
from accelerate.nested import (
    TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE,
    TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT,
    TensorInformation as TensorInformation,
    concatenate as concatenate,
    find_batch_size as find_batch_size,
    find_device as find_device,
    get_data_structure as get_data_structure,
    get_shape as get_shape,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    is_torch_xpu_tensor as is_torch_xpu_tensor,
    listify as listify,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from accelerate.ops import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    DistributedOperationException as DistributedOperationException,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    chained_operation as chained_operation,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
    copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather,
    gather_object as gather_object,
    gather_tensor_shape as gather_tensor_shape,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
    reduce as reduce,
    verify_operation as verify_operation,
)
from accelerate.state import AcceleratorState as AcceleratorState, PartialState as PartialState
from accelerate.weights import GatheredParameters as GatheredParameters
