"""Code that runs around a module's forward."""

from accelerate.base.text import recursive_getattr as recursive_getattr
from accelerate.devices.availability import is_mlu_available as is_mlu_available
from accelerate.devices.availability import is_musa_available as is_musa_available
from accelerate.devices.availability import is_npu_available as is_npu_available
from accelerate.devices.memory import clear_device_cache as clear_device_cache
from accelerate.hooks.align import AlignDevicesHook as AlignDevicesHook
from accelerate.hooks.attach import attach_align_device_hook as attach_align_device_hook
from accelerate.hooks.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from accelerate.hooks.attach import attach_execution_device_hook as attach_execution_device_hook
from accelerate.hooks.base import ModelHook as ModelHook
from accelerate.hooks.base import SequentialHook as SequentialHook
from accelerate.hooks.base import add_hook_to_module as add_hook_to_module
from accelerate.hooks.base import remove_hook_from_module as remove_hook_from_module
from accelerate.hooks.base import remove_hook_from_submodules as remove_hook_from_submodules
from accelerate.hooks.casting import LayerwiseCastingHook as LayerwiseCastingHook
from accelerate.hooks.offload import CpuOffload as CpuOffload
from accelerate.hooks.offload import UserCpuOffloadHook as UserCpuOffloadHook
from accelerate.nested import find_device as find_device
from accelerate.nested import send_to_device as send_to_device
from accelerate.state import PartialState as PartialState
from accelerate.weights.modules import get_non_persistent_buffers as get_non_persistent_buffers
from accelerate.weights.modules import named_module_tensors as named_module_tensors
from accelerate.weights.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accelerate.weights.store import PrefixedDataset as PrefixedDataset
