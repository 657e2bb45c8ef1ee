"""Old import path of what is nowhere else."""

from accelerate.base import (
    FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION,
    DistributedType as DistributedType,
    check_os_kernel as check_os_kernel,
    convert_bytes as convert_bytes,
    get_pretty_name as get_pretty_name,
    is_deepspeed_available as is_deepspeed_available,
    is_numpy_available as is_numpy_available,
    is_torch_version as is_torch_version,
    is_weights_only_available as is_weights_only_available,
    merge_dicts as merge_dicts,
    recursive_getattr as recursive_getattr,
)
from accelerate.commands.config.default import write_basic_config as write_basic_config
from accelerate.compilation import (
    compile_regions as compile_regions,
    compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    has_compiled_regions as has_compiled_regions,
    has_repeated_blocks as has_repeated_blocks,
    is_compiled_module as is_compiled_module,
    is_repeated_blocks as is_repeated_blocks,
)
from accelerate.devices import (
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_xla_available as is_torch_xla_available,
)
from accelerate.launch import get_free_port as get_free_port, is_port_in_use as is_port_in_use
from accelerate.logging import get_logger as get_logger
from accelerate.precision import convert_model as convert_model
from accelerate.state import PartialState as PartialState, wait_for_everyone as wait_for_everyone
from accelerate.unwrapping import extract_model_from_parallel as extract_model_from_parallel
from accelerate.weights import (
    TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS,
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    get_model_tp_size as get_model_tp_size,
    get_module_children_bottom_up as get_module_children_bottom_up,
    id_tensor_storage as id_tensor_storage,
    load as load,
    model_has_dtensor as model_has_dtensor,
    save as save,
)
