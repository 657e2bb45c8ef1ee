"""Old import path of what frees memory and retries with less of it."""

from accelerate.devices import (
    clear_device_cache as clear_device_cache,
    is_cuda_available as is_cuda_available,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_sdaa_available as is_sdaa_available,
    is_xpu_available as is_xpu_available,
    release_memory as release_memory,
)
from accelerate.diagnostics import (
    find_executable_batch_size as find_executable_batch_size,
    should_reduce_batch_size as should_reduce_batch_size,
)
