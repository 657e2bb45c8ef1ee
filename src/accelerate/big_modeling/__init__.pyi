from accelerate.base import (
    is_bnb_available as is_bnb_available,
    parse_flag_from_env as parse_flag_from_env,
    recursive_getattr as recursive_getattr,
)
from accelerate.big_modeling.budget import (
    Memory as Memory,
    Unit as Unit,
    even_limits as even_limits,
    fill as fill,
    fits as fits,
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
    min_units_on_first as min_units_on_first,
    plan_memory as plan_memory,
    smallest_limit as smallest_limit,
    split_into_units as split_into_units,
    total as total,
)
from accelerate.big_modeling.device_map import (
    METHODS as METHODS,
    assign_units as assign_units,
    check_device_map as check_device_map,
    check_devices as check_devices,
    clean_device_map as clean_device_map,
    device_key as device_key,
    explain_device_map as explain_device_map,
    fallback_allocate as fallback_allocate,
    fill_empty_devices as fill_empty_devices,
    infer_auto_device_map as infer_auto_device_map,
    plan_device_map as plan_device_map,
    shorten as shorten,
)
from accelerate.big_modeling.dispatch import (
    cpu_offload as cpu_offload,
    cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    find_offloaded as find_offloaded,
    guard_moves as guard_moves,
    keep_in_memory as keep_in_memory,
    keep_on_disk as keep_on_disk,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    move_whole as move_whole,
    remove_old_hooks as remove_old_hooks,
)
from accelerate.big_modeling.load import (
    check_options as check_options,
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
    load_checkpoint_in_model as load_checkpoint_in_model,
    receive_weights as receive_weights,
)
from accelerate.big_modeling.moves import LoadOptions as LoadOptions, plan_moves as plan_moves
from accelerate.devices import (
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    is_mlu_available as is_mlu_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_sdaa_available as is_sdaa_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.hooks import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    AlignDevicesHook as AlignDevicesHook,
    CpuOffload as CpuOffload,
    LayerwiseCastingHook as LayerwiseCastingHook,
    UserCpuOffloadHook as UserCpuOffloadHook,
    add_hook_to_module as add_hook_to_module,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
)
from accelerate.weights import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    extract_submodules_state_dict as extract_submodules_state_dict,
    find_tied_parameters as find_tied_parameters,
    offload_state_dict as offload_state_dict,
    retie_parameters as retie_parameters,
)
