"""The public class: `Accelerator`.

`prepare_data_loader` and the other names of `__all__` are looked up here when they are used, so a client that
replaces one of them in this module takes effect. The rest is part of this import path.
"""

from accelerate.accelerator.core import Accelerator
from accelerate.base.constants import DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION
from accelerate.base.constants import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
from accelerate.base.constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accelerate.base.constants import MODEL_NAME as MODEL_NAME
from accelerate.base.constants import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from accelerate.base.constants import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accelerate.base.constants import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accelerate.base.constants import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accelerate.base.constants import SCALER_NAME as SCALER_NAME
from accelerate.base.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accelerate.base.constants import WEIGHTS_NAME as WEIGHTS_NAME
from accelerate.base.constants import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from accelerate.base.enums import DistributedType as DistributedType
from accelerate.base.enums import DynamoBackend as DynamoBackend
from accelerate.base.enums import FP8BackendType as FP8BackendType
from accelerate.base.enums import LoggerType as LoggerType
from accelerate.base.enums import PrecisionType as PrecisionType
from accelerate.base.enums import RNGType as RNGType
from accelerate.base.environ import parse_choice_from_env as parse_choice_from_env
from accelerate.base.lazy import attach
from accelerate.base.packages import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from accelerate.base.packages import is_deepspeed_available as is_deepspeed_available
from accelerate.base.packages import is_lomo_available as is_lomo_available
from accelerate.base.packages import is_megatron_lm_available as is_megatron_lm_available
from accelerate.base.packages import is_msamp_available as is_msamp_available
from accelerate.base.packages import is_torchao_available as is_torchao_available
from accelerate.base.system import check_os_kernel as check_os_kernel
from accelerate.base.text import get_pretty_name as get_pretty_name
from accelerate.base.versions import compare_versions as compare_versions
from accelerate.base.versions import is_torch_version as is_torch_version
from accelerate.checkpointing import load_accelerator_state as load_accelerator_state
from accelerate.checkpointing import load_custom_state as load_custom_state
from accelerate.checkpointing import save_accelerator_state as save_accelerator_state
from accelerate.checkpointing import save_custom_state as save_custom_state
from accelerate.compilation import compile_regions as compile_regions
from accelerate.compilation import compile_regions_deepspeed as compile_regions_deepspeed
from accelerate.compilation import compile_regions_fsdp2 as compile_regions_fsdp2
from accelerate.compilation import is_compiled_module as is_compiled_module
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.data_loader.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from accelerate.devices.availability import is_bf16_available as is_bf16_available
from accelerate.devices.availability import is_mlu_available as is_mlu_available
from accelerate.devices.availability import is_musa_available as is_musa_available
from accelerate.devices.availability import is_npu_available as is_npu_available
from accelerate.devices.availability import is_torch_xla_available as is_torch_xla_available
from accelerate.devices.availability import is_transformer_engine_available as is_transformer_engine_available
from accelerate.devices.availability import is_xpu_available as is_xpu_available
from accelerate.devices.memory import release_memory as release_memory
from accelerate.hooks.offloaded import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from accelerate.hooks.offloaded import has_offloaded_params as has_offloaded_params
from accelerate.logging import get_logger as get_logger
from accelerate.nested import recursively_apply as recursively_apply
from accelerate.ops.casting import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accelerate.ops.collectives import gather as gather
from accelerate.ops.collectives import gather_object as gather_object
from accelerate.ops.collectives import reduce as reduce
from accelerate.ops.padding import pad_across_processes as pad_across_processes
from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accelerate.plugins.dynamo import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate.plugins.fp8 import AORecipeKwargs as AORecipeKwargs
from accelerate.plugins.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accelerate.plugins.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accelerate.plugins.fp8 import TERecipeKwargs as TERecipeKwargs
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelerate.plugins.handlers import AutocastKwargs as AutocastKwargs
from accelerate.plugins.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accelerate.plugins.handlers import GradScalerKwargs as GradScalerKwargs
from accelerate.plugins.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accelerate.plugins.handlers import KwargsHandler as KwargsHandler
from accelerate.plugins.megatron import MegatronLMPlugin as MegatronLMPlugin
from accelerate.plugins.parallel import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accelerate.plugins.profile import ProfileKwargs as ProfileKwargs
from accelerate.plugins.training import DataLoaderConfiguration as DataLoaderConfiguration
from accelerate.plugins.training import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate.plugins.training import ProjectConfiguration as ProjectConfiguration
from accelerate.precision.amp import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate.precision.amp import get_grad_scaler as get_grad_scaler
from accelerate.precision.amp import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.precision.torchao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accelerate.precision.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accelerate.precision.transformer_engine import convert_model as convert_model
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.state.partial import wait_for_everyone as wait_for_everyone
from accelerate.strategies.deepspeed.dummies import DummyOptim as DummyOptim
from accelerate.strategies.deepspeed.dummies import DummyScheduler as DummyScheduler
from accelerate.strategies.deepspeed.optimizers import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accelerate.strategies.deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accelerate.strategies.deepspeed.wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accelerate.strategies.deepspeed.wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from accelerate.strategies.fsdp.loading import ensure_weights_retied as ensure_weights_retied
from accelerate.strategies.fsdp.parameters import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate.strategies.fsdp.parameters import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.strategies.fsdp.sharding import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate.strategies.fsdp.sharding import fsdp2_prepare_model
from accelerate.tracking.base import GeneralTracker as GeneralTracker
from accelerate.tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from accelerate.tracking.registry import filter_trackers as filter_trackers
from accelerate.unwrapping import extract_model_from_parallel as extract_model_from_parallel
from accelerate.weights.files import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accelerate.weights.files import save as save
from accelerate.weights.modules import get_model_tp_size as get_model_tp_size
from accelerate.weights.modules import model_has_dtensor as model_has_dtensor

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "fsdp2_prepare_model",
    "prepare_data_loader",
    "skip_first_batches",
]

# What these need of torch takes half a second to import.
_LATER = ("load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer")
__getattr__ = attach(__name__, dict.fromkeys(_LATER, "accelerate.strategies.fsdp.checkpoint"))[0]
