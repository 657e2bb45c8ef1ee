from accelerate.base import recursive_getattr as recursive_getattr
from accelerate.devices import (
    clear_device_cache as clear_device_cache,
    is_mlu_available as is_mlu_available,
    is_musa_available as is_musa_available,
    is_npu_available as is_npu_available,
)
from accelerate.hooks.align import (
    AlignDevicesHook as AlignDevicesHook,
    Slot as Slot,
    all_on_device as all_on_device,
    find_slots as find_slots,
)
from accelerate.hooks.base import (
    METHODS_THAT_MOVE as METHODS_THAT_MOVE,
    METHODS_THAT_MOVE as _accelerate_added_attributes,
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    LayerwiseCastingHook as LayerwiseCastingHook,
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    add_hook_to_module as add_hook_to_module,
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    hooks_of as hooks_of,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from accelerate.hooks.offload import (
    CpuOffload as CpuOffload,
    StoredWeight as StoredWeight,
    UserCpuOffloadHook as UserCpuOffloadHook,
    align_hooks as align_hooks,
    align_module_device as align_module_device,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
    is_any_offloaded as is_any_offloaded,
    read_weight as read_weight,
    stored_weights as stored_weights,
)
from accelerate.hooks.prefetch import (
    Prefetcher as Prefetcher,
    StreamTransfer as StreamTransfer,
    Transfer as Transfer,
    transfer_to as transfer_to,
)
from accelerate.hooks.unloaded import is_unloaded as is_unloaded
from accelerate.nested import find_device as find_device, send_to_device as send_to_device
from accelerate.state import PartialState as PartialState
from accelerate.weights import (
    PrefixedDataset as PrefixedDataset,
    get_non_persistent_buffers as get_non_persistent_buffers,
    named_module_tensors as named_module_tensors,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
