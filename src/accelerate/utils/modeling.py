"""Old import path of what measures, places and loads modules."""

from accelerate.base.constants import (
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accelerate.base.enums import (
    CustomDtype as CustomDtype,
    DistributedType as DistributedType,
)
from accelerate.base.packages import (
    is_peft_available as is_peft_available,
    is_tqdm_available as is_tqdm_available,
)
from accelerate.base.text import convert_file_size_to_int as convert_file_size_to_int
from accelerate.base.versions import is_torch_version as is_torch_version
from accelerate.devices.availability import (
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_npu_available as is_npu_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.devices.memory import clear_device_cache as clear_device_cache
from accelerate.display import tqdm as tqdm
from accelerate.plugins.handlers import AutocastKwargs as AutocastKwargs
from accelerate.precision.amp import (
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.state.accelerator_state import AcceleratorState as AcceleratorState
from accelerate.unwrapping import is_peft_model as is_peft_model
