"""Old import path of the random generators."""

from accelerate.base import (
    CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES,
    DistributedType as DistributedType,
    RNGType as RNGType,
)
from accelerate.devices import (
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.rng import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from accelerate.state import AcceleratorState as AcceleratorState
