"""`notebook_launcher` and `debug_launcher`; the rest is part of this import path."""

from accelerate.base.constants import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
from accelerate.base.enums import PrecisionType as PrecisionType
from accelerate.base.environ import patch_environment as patch_environment
from accelerate.base.packages import are_libraries_initialized as are_libraries_initialized
from accelerate.base.versions import is_torch_version as is_torch_version
from accelerate.devices.availability import is_mps_available as is_mps_available
from accelerate.devices.availability import is_rocm_available as is_rocm_available
from accelerate.devices.hardware_table import get_current_device_type as get_current_device_type
from accelerate.devices.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate.devices.nvidia import get_gpu_info as get_gpu_info
from accelerate.launch.worker import PrepareForLaunch as PrepareForLaunch
from accelerate.launchers.notebook import debug_launcher, notebook_launcher, test_launch
from accelerate.state import AcceleratorState as AcceleratorState
from accelerate.state import PartialState as PartialState

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]
