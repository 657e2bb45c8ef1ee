"""Old import path of what measures, places and loads modules."""

from accelerate.base import (
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    CustomDtype as CustomDtype,
    DistributedType as DistributedType,
    convert_file_size_to_int as convert_file_size_to_int,
    is_peft_available as is_peft_available,
    is_torch_version as is_torch_version,
    is_tqdm_available as is_tqdm_available,
)
from accelerate.big_modeling import (
    check_device_map as check_device_map,
    clean_device_map as clean_device_map,
    fallback_allocate as fallback_allocate,
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from accelerate.devices import (
    clear_device_cache as clear_device_cache,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_npu_available as is_npu_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.display import tqdm as tqdm
from accelerate.hooks import (
    align_module_device as align_module_device,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
)
from accelerate.plugins import AutocastKwargs as AutocastKwargs
from accelerate.precision import (
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.state import AcceleratorState as AcceleratorState
from accelerate.unwrapping import is_peft_model as is_peft_model
from accelerate.weights import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    check_device_same as check_device_same,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    dtype_byte_size as dtype_byte_size,
    find_tied_parameters as find_tied_parameters,
    get_max_layer_size as get_max_layer_size,
    get_module_leaves as get_module_leaves,
    get_module_size_with_ties as get_module_size_with_ties,
    get_non_persistent_buffers as get_non_persistent_buffers,
    id_tensor_storage as id_tensor_storage,
    load_offloaded_weight as load_offloaded_weight,
    load_offloaded_weights as load_offloaded_weights,
    load_state_dict as load_state_dict,
    named_module_tensors as named_module_tensors,
    offload_weight as offload_weight,
    read_dtype as _get_proper_dtype,
    retie_parameters as retie_parameters,
    save_offload_index as save_offload_index,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
