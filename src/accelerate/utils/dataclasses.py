"""Old import path of the enumerations and plugins."""

from accelerate.base.constants import (
    BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
    FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION,
    FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY,
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate.base.enums import (
    BaseEnum as BaseEnum,
    ComputeEnvironment as ComputeEnvironment,
    CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    EnumWithContains as EnumWithContains,
    FP8BackendType as FP8BackendType,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accelerate.base.environ import (
    parse_flag_from_env as parse_flag_from_env,
    str_to_bool as str_to_bool,
)
from accelerate.base.packages import (
    is_msamp_available as is_msamp_available,
    is_torchao_available as is_torchao_available,
)
from accelerate.base.versions import (
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)
from accelerate.devices.availability import (
    is_cuda_available as is_cuda_available,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_rocm_available as is_rocm_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.nested import TensorInformation as TensorInformation
from accelerate.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accelerate.plugins.dynamo import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelerate.plugins.fsdp_wrapping import get_module_class_from_name as get_module_class_from_name
from accelerate.plugins.fp8 import (
    AORecipeKwargs as AORecipeKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    TERecipeKwargs as TERecipeKwargs,
)
from accelerate.plugins.handlers import (
    AutocastKwargs as AutocastKwargs,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
)
from accelerate.plugins.megatron import MegatronLMPlugin as MegatronLMPlugin
from accelerate.plugins.megatron_models import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    parse_bert_config as parse_bert_config,
    parse_glm4_moe_config as parse_glm4_moe_config,
    parse_gpt2_config as parse_gpt2_config,
    parse_llama_config as parse_llama_config,
    parse_t5_config as parse_t5_config,
)
from accelerate.plugins.parallel import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accelerate.plugins.profile import ProfileKwargs as ProfileKwargs
from accelerate.plugins.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.plugins.training import (
    DataLoaderConfiguration as DataLoaderConfiguration,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    ProjectConfiguration as ProjectConfiguration,
)
from typing import TYPE_CHECKING as TYPE_CHECKING
