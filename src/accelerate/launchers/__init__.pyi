from accelerate.base import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
    PrecisionType as PrecisionType,
    are_libraries_initialized as are_libraries_initialized,
    is_torch_version as is_torch_version,
    patch_environment as patch_environment,
)
from accelerate.devices import (
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    get_current_device_type as get_current_device_type,
    get_gpu_info as get_gpu_info,
    is_mps_available as is_mps_available,
    is_rocm_available as is_rocm_available,
)
from accelerate.launch import PrepareForLaunch as PrepareForLaunch
from accelerate.launchers.notebook import (
    LocalWorkers as LocalWorkers,
    debug_launcher as debug_launcher,
    notebook_launcher as notebook_launcher,
    run_elastic as run_elastic,
    test_launch as test_launch,
)
from accelerate.state import AcceleratorState as AcceleratorState, PartialState as PartialState
