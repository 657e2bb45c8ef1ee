from accelerate.base import is_tqdm_available as is_tqdm_available
from accelerate.big_modeling import (
    clean_device_map as clean_device_map,
    fallback_allocate as fallback_allocate,
)
from accelerate.devices import clear_device_cache as clear_device_cache
from accelerate.hooks import (
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
)
from accelerate.state import AcceleratorState as AcceleratorState
from accelerate.utils import *
from accelerate.weights import (
    check_device_same as check_device_same,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    get_module_leaves as get_module_leaves,
    get_module_size_with_ties as get_module_size_with_ties,
    get_non_persistent_buffers as get_non_persistent_buffers,
    logger as logger,
    read_dtype as _get_proper_dtype,
)
