"""Old import path of what shards, loads and merges models under FSDP."""

from accelerate.base import (
    FSDP_MODEL_NAME as FSDP_MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    is_torch_version as is_torch_version,
)
from accelerate.compilation import is_compiled_module as is_compiled_module
from accelerate.logging import get_logger as get_logger
from accelerate.plugins import get_module_class_from_name as get_module_class_from_name
from accelerate.precision import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate.strategies.fsdp import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model as fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
    get_parameters_from_modules as get_parameters_from_modules,
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accelerate.strategies.fsdp.checkpoint import (
    _get_model_state_dict as _get_model_state_dict,
    _prepare_sd_options as _prepare_sd_options,
    _set_model_state_dict as _set_model_state_dict,
)
from accelerate.unwrapping import is_peft_model as is_peft_model
from accelerate.weights import (
    get_module_children_bottom_up as get_module_children_bottom_up,
    get_non_persistent_buffers as get_non_persistent_buffers,
    save as save,
)
