"""Models larger than a device: plan, load, dispatch."""

from accelerate.base.environ import parse_flag_from_env as parse_flag_from_env
from accelerate.base.packages import is_bnb_available as is_bnb_available
from accelerate.base.text import recursive_getattr as recursive_getattr
from accelerate.big_modeling.budget import get_balanced_memory as get_balanced_memory
from accelerate.big_modeling.budget import get_max_memory as get_max_memory
from accelerate.big_modeling.checking import check_device_map as check_device_map
from accelerate.big_modeling.device_map import clean_device_map as clean_device_map
from accelerate.big_modeling.device_map import infer_auto_device_map as infer_auto_device_map
from accelerate.big_modeling.dispatch import cpu_offload as cpu_offload
from accelerate.big_modeling.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from accelerate.big_modeling.dispatch import disk_offload as disk_offload
from accelerate.big_modeling.dispatch import dispatch_model as dispatch_model
from accelerate.big_modeling.dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accelerate.big_modeling.explain import explain_device_map as explain_device_map
from accelerate.big_modeling.init import init_empty_weights as init_empty_weights
from accelerate.big_modeling.init import init_on_device as init_on_device
from accelerate.big_modeling.layerwise import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
from accelerate.big_modeling.layerwise import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from accelerate.big_modeling.load import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.devices.availability import is_mlu_available as is_mlu_available
from accelerate.devices.availability import is_musa_available as is_musa_available
from accelerate.devices.availability import is_neuron_available as is_neuron_available
from accelerate.devices.availability import is_npu_available as is_npu_available
from accelerate.devices.availability import is_sdaa_available as is_sdaa_available
from accelerate.devices.availability import is_xpu_available as is_xpu_available
from accelerate.devices.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate.hooks.align import AlignDevicesHook as AlignDevicesHook
from accelerate.hooks.attach import attach_align_device_hook as attach_align_device_hook
from accelerate.hooks.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from accelerate.hooks.base import add_hook_to_module as add_hook_to_module
from accelerate.hooks.casting import LayerwiseCastingHook as LayerwiseCastingHook
from accelerate.hooks.offload import CpuOffload as CpuOffload
from accelerate.hooks.offload import UserCpuOffloadHook as UserCpuOffloadHook
from accelerate.weights.store import OffloadedWeightsLoader as OffloadedWeightsLoader
from accelerate.weights.store import extract_submodules_state_dict as extract_submodules_state_dict
from accelerate.weights.store import offload_state_dict as offload_state_dict
from accelerate.weights.tied import find_tied_parameters as find_tied_parameters
from accelerate.weights.tied import retie_parameters as retie_parameters
