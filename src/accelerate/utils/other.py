"""Old import path of what is nowhere else."""

from accelerate.base.constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accelerate.base.enums import DistributedType as DistributedType
from accelerate.base.packages import (
    is_deepspeed_available as is_deepspeed_available,
    is_numpy_available as is_numpy_available,
    is_weights_only_available as is_weights_only_available,
)
from accelerate.base.system import check_os_kernel as check_os_kernel
from accelerate.base.text import (
    convert_bytes as convert_bytes,
    get_pretty_name as get_pretty_name,
    merge_dicts as merge_dicts,
    recursive_getattr as recursive_getattr,
)
from accelerate.base.versions import is_torch_version as is_torch_version
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
from accelerate.devices.availability import (
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_xla_available as is_torch_xla_available,
)
from accelerate.launch.ports import (
    get_free_port as get_free_port,
    is_port_in_use as is_port_in_use,
)
from accelerate.logging import get_logger as get_logger
from accelerate.state.partial import (
    PartialState as PartialState,
    wait_for_everyone as wait_for_everyone,
)
from accelerate.unwrapping import extract_model_from_parallel as extract_model_from_parallel
from accelerate.weights.files import (
    TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS,
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    load as load,
    save as save,
)
from accelerate.weights.placement import id_tensor_storage as id_tensor_storage
from accelerate.precision.transformer_engine import convert_model as convert_model
from accelerate.weights.modules import get_model_tp_size as get_model_tp_size
from accelerate.weights.modules import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate.weights.modules import model_has_dtensor as model_has_dtensor
