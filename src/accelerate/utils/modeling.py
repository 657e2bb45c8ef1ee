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
from accelerate.big_modeling.budget import (
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
)
from accelerate.big_modeling.checking import check_device_map as check_device_map
from accelerate.big_modeling.device_map import (
    clean_device_map as clean_device_map,
    infer_auto_device_map as infer_auto_device_map,
)
from accelerate.big_modeling.fallback import fallback_allocate as fallback_allocate
from accelerate.big_modeling.load import load_checkpoint_in_model as load_checkpoint_in_model
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
from accelerate.hooks.offloaded import (
    align_module_device as align_module_device,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
)
from accelerate.plugins.handlers import AutocastKwargs as AutocastKwargs
from accelerate.precision.amp import (
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.state.accelerator_state import AcceleratorState as AcceleratorState
from accelerate.unwrapping import is_peft_model as is_peft_model
from accelerate.weights.files import load_state_dict as load_state_dict
from accelerate.weights.modules import (
    get_module_leaves as get_module_leaves,
    get_non_persistent_buffers as get_non_persistent_buffers,
    named_module_tensors as named_module_tensors,
)
from accelerate.weights.placement import (
    check_device_same as check_device_same,
    id_tensor_storage as id_tensor_storage,
    read_dtype as _get_proper_dtype,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from accelerate.weights.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    dtype_byte_size as dtype_byte_size,
    get_max_layer_size as get_max_layer_size,
    get_module_size_with_ties as get_module_size_with_ties,
)
from accelerate.weights.index import save_offload_index as save_offload_index
from accelerate.weights.store import (
    load_offloaded_weight as load_offloaded_weight,
    load_offloaded_weights as load_offloaded_weights,
    offload_weight as offload_weight,
)
from accelerate.weights.tied import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    find_tied_parameters as find_tied_parameters,
    retie_parameters as retie_parameters,
)
from accelerate.weights.tied import check_tied_parameters_in_config as check_tied_parameters_in_config
