import torch as torch

from accelerate.accelerator import (
    average_files as average_files,
    averaging as averaging,
    contexts as contexts,
    fast_saves as fast_saves,
    flops as flops,
    memory_plan as memory_plan,
    merged_adapters as merged_adapters,
    metrics as metrics,
    state_items as state_items,
    weight_stream as weight_stream,
)
from accelerate.accelerator.accumulation import Accumulation as Accumulation
from accelerate.accelerator.arguments import _UNSET as _split_batches, build_request as build_request
from accelerate.accelerator.core import Accelerator as Accelerator
from accelerate.accelerator.loss_options import check_loss as check_loss
from accelerate.accelerator.weighting import (
    ItemWeighting as ItemWeighting,
    factor_of as factor_of,
    read_items as read_items,
    rescale_gradients as rescale_gradients,
    sum_items as sum_items,
)
from accelerate.base import (
    DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION,
    FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION,
    FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION,
    MODEL_NAME as MODEL_NAME,
    PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    SCALER_NAME as SCALER_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    FP8BackendType as FP8BackendType,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
    check_os_kernel as check_os_kernel,
    compare_versions as compare_versions,
    get_pretty_name as get_pretty_name,
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_deepspeed_available as is_deepspeed_available,
    is_lomo_available as is_lomo_available,
    is_megatron_lm_available as is_megatron_lm_available,
    is_msamp_available as is_msamp_available,
    is_torch_version as is_torch_version,
    is_torchao_available as is_torchao_available,
    parse_choice_from_env as parse_choice_from_env,
)
from accelerate.checkpointing import (
    load_accelerator_state as load_accelerator_state,
    load_custom_state as load_custom_state,
    save_accelerator_state as save_accelerator_state,
    save_custom_state as save_custom_state,
)
from accelerate.data_loader import (
    DataLoaderDispatcher as DataLoaderDispatcher,
    prepare_data_loader as prepare_data_loader,
    skip_first_batches as skip_first_batches,
)
from accelerate.devices import (
    is_bf16_available as is_bf16_available,
    is_mlu_available as is_mlu_available,
    is_musa_available as is_musa_available,
    is_npu_available as is_npu_available,
    is_torch_xla_available as is_torch_xla_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_xpu_available as is_xpu_available,
    release_memory as release_memory,
)
from accelerate.hooks import (
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
)
from accelerate.logging import get_logger as get_logger
from accelerate.nested import recursively_apply as recursively_apply
from accelerate.ops import (
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    gather as gather,
    gather_object as gather_object,
    pad_across_processes as pad_across_processes,
    reduce as reduce,
)
from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate.plugins import (
    AORecipeKwargs as AORecipeKwargs,
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DeepSpeedPlugin as DeepSpeedPlugin,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    MegatronLMPlugin as MegatronLMPlugin,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
    TERecipeKwargs as TERecipeKwargs,
    TorchDynamoPlugin as TorchDynamoPlugin,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accelerate.precision import (
    apply_fp8_autowrap as apply_fp8_autowrap,
    convert_model as convert_model,
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.state import (
    AcceleratorState as AcceleratorState,
    GradientState as GradientState,
    PartialState as PartialState,
    wait_for_everyone as wait_for_everyone,
)
from accelerate.strategies.deepspeed import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accelerate.strategies.dtensors import (
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.strategies.fsdp import (
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_prepare_model as fsdp2_prepare_model,
)
from accelerate.strategies.fsdp.checkpoint import (
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    GeneralTracker as GeneralTracker,
    filter_trackers as filter_trackers,
)
from accelerate.weights import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    get_model_tp_size as get_model_tp_size,
    model_has_dtensor as model_has_dtensor,
    save as save,
)
from accelerate.wrappers import (
    compile_regions as compile_regions,
    compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    extract_model_from_parallel as extract_model_from_parallel,
    is_compiled_module as is_compiled_module,
)
