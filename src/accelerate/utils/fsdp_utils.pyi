from accelerate.base import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accelerate.logging import get_logger as get_logger
from accelerate.plugins import get_module_class_from_name as get_module_class_from_name
from accelerate.strategies.fsdp import (
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
    get_parameters_from_modules as get_parameters_from_modules,
)
from accelerate.strategies.fsdp.checkpoint import (
    _get_model_state_dict as _get_model_state_dict,
    _prepare_sd_options as _prepare_sd_options,
    _set_model_state_dict as _set_model_state_dict,
)
from accelerate.utils import *
from accelerate.weights import get_non_persistent_buffers as get_non_persistent_buffers
