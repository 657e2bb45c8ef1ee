"""What is saved, and how it reaches the disk.

The names below are loaded on first use: reading a manifest needs no torch.
"""

from typing import TYPE_CHECKING

from accelerate.base.lazy import attach

if TYPE_CHECKING:
    from accelerate.base.constants import MODEL_NAME as MODEL_NAME
    from accelerate.base.constants import OPTIMIZER_NAME as OPTIMIZER_NAME
    from accelerate.base.constants import RNG_STATE_NAME as RNG_STATE_NAME
    from accelerate.base.constants import SAFE_MODEL_NAME as SAFE_MODEL_NAME
    from accelerate.base.constants import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from accelerate.base.constants import SAMPLER_NAME as SAMPLER_NAME
    from accelerate.base.constants import SCALER_NAME as SCALER_NAME
    from accelerate.base.constants import SCHEDULER_NAME as SCHEDULER_NAME
    from accelerate.base.constants import WEIGHTS_NAME as WEIGHTS_NAME
    from accelerate.base.text import get_pretty_name as get_pretty_name
    from accelerate.base.versions import is_torch_version as is_torch_version
    from accelerate.checkpointing.state import load_accelerator_state as load_accelerator_state
    from accelerate.checkpointing.state import load_custom_state as load_custom_state
    from accelerate.checkpointing.state import save_accelerator_state as save_accelerator_state
    from accelerate.checkpointing.state import save_custom_state as save_custom_state
    from accelerate.devices.availability import is_cuda_available as is_cuda_available
    from accelerate.devices.availability import is_hpu_available as is_hpu_available
    from accelerate.devices.availability import is_mlu_available as is_mlu_available
    from accelerate.devices.availability import is_musa_available as is_musa_available
    from accelerate.devices.availability import is_neuron_available as is_neuron_available
    from accelerate.devices.availability import is_sdaa_available as is_sdaa_available
    from accelerate.devices.availability import is_torch_xla_available as is_torch_xla_available
    from accelerate.devices.availability import is_xpu_available as is_xpu_available
    from accelerate.logging import get_logger as get_logger
    from accelerate.state import PartialState as PartialState
    from accelerate.weights.files import load as load
    from accelerate.weights.files import save as save

# Public name -> the module that holds it.
_HOMES = {
    "MODEL_NAME": "accelerate.base.constants",
    "OPTIMIZER_NAME": "accelerate.base.constants",
    "PartialState": "accelerate.state",
    "RNG_STATE_NAME": "accelerate.base.constants",
    "SAFE_MODEL_NAME": "accelerate.base.constants",
    "SAFE_WEIGHTS_NAME": "accelerate.base.constants",
    "SAMPLER_NAME": "accelerate.base.constants",
    "SCALER_NAME": "accelerate.base.constants",
    "SCHEDULER_NAME": "accelerate.base.constants",
    "WEIGHTS_NAME": "accelerate.base.constants",
    "get_logger": "accelerate.logging",
    "get_pretty_name": "accelerate.base.text",
    "is_cuda_available": "accelerate.devices.availability",
    "is_hpu_available": "accelerate.devices.availability",
    "is_mlu_available": "accelerate.devices.availability",
    "is_musa_available": "accelerate.devices.availability",
    "is_neuron_available": "accelerate.devices.availability",
    "is_sdaa_available": "accelerate.devices.availability",
    "is_torch_version": "accelerate.base.versions",
    "is_torch_xla_available": "accelerate.devices.availability",
    "is_xpu_available": "accelerate.devices.availability",
    "load": "accelerate.weights.files",
    "load_accelerator_state": "accelerate.checkpointing.state",
    "load_custom_state": "accelerate.checkpointing.state",
    "save": "accelerate.weights.files",
    "save_accelerator_state": "accelerate.checkpointing.state",
    "save_custom_state": "accelerate.checkpointing.state",
}

_load, __dir__, __all__ = attach(__name__, _HOMES)

if not TYPE_CHECKING:
    __getattr__ = _load
