"""Code that runs around a module's forward."""

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
