from accelerate.weights.blocks import find_blocks as find_blocks, has_forward as has_forward
from accelerate.weights.files import (
    TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS,
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    load as load,
    load_state_dict as load_state_dict,
    read_safetensors as read_safetensors,
    read_torch as read_torch,
    refused_globals as refused_globals,
    save as save,
    write_safetensors as write_safetensors,
    write_torch as write_torch,
    write_whole_tensors as write_whole_tensors,
)
from accelerate.weights.gathered import GatheredParameters as GatheredParameters
from accelerate.weights.index import (
    INDEX as INDEX,
    Folder as Folder,
    Index as Index,
    make_folder as make_folder,
    read_index as read_index,
    read_weight_map as read_weight_map,
    save_offload_index as save_offload_index,
)
from accelerate.weights.int8 import (
    quantize_and_offload_8bit as quantize_and_offload_8bit,
    quantize_rows as quantize_rows,
)
from accelerate.weights.mapping import DTYPES as DTYPES, MappedFile as MappedFile
from accelerate.weights.modules import (
    all_tensors as all_tensors,
    get_model_tp_size as get_model_tp_size,
    get_module_children_bottom_up as get_module_children_bottom_up,
    get_module_leaves as get_module_leaves,
    get_non_persistent_buffers as get_non_persistent_buffers,
    model_has_dtensor as model_has_dtensor,
    named_module_tensors as named_module_tensors,
)
from accelerate.weights.packed import (
    INT4 as INT4,
    INT8 as INT8,
    OUTLINE as OUTLINE,
    is_own_class as is_own_class,
    keeps_another_shape as keeps_another_shape,
    let_go as let_go,
    parts_of as parts_of,
    quantizes_itself as quantizes_itself,
    scales_of as scales_of,
    shape_of as shape_of,
    take_parts as take_parts,
    with_parts as with_parts,
)
from accelerate.weights.placement import (
    Device as Device,
    check_device_same as check_device_same,
    check_here as check_here,
    entry_of as entry_of,
    find_home as find_home,
    id_tensor_storage as id_tensor_storage,
    place_of as place_of,
    read_dtype as read_dtype,
    renew as renew,
    resolve_device as resolve_device,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from accelerate.weights.reading import (
    WeightFile as WeightFile,
    Weights as Weights,
    is_extra as is_extra,
    open_weights as open_weights,
)
from accelerate.weights.shared import (
    addressable as addressable,
    drop_shared as drop_shared,
    lacking_names as lacking_names,
    missing_names as missing_names,
    restore_shared as restore_shared,
)
from accelerate.weights.sizes import (
    Dtype as Dtype,
    NamedModule as NamedModule,
    calculate_maximum_sizes as calculate_maximum_sizes,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    dtype_byte_size as dtype_byte_size,
    get_max_layer_size as get_max_layer_size,
    get_module_size_with_ties as get_module_size_with_ties,
    tensor_bytes as tensor_bytes,
)
from accelerate.weights.store import (
    STATISTICS as STATISTICS,
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    beside as beside,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight,
    load_offloaded_weights as load_offloaded_weights,
    note_files as note_files,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
)
from accelerate.weights.tied import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    find_tied_parameters as find_tied_parameters,
    retie_on_same_device as retie_on_same_device,
    retie_parameters as retie_parameters,
)
