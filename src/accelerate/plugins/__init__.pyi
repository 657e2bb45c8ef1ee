from accelerate.plugins.activations import ActivationCheckpointing as ActivationCheckpointing
from accelerate.plugins.checks import at_least as at_least, one_of as one_of, plain_fields as plain_fields
from accelerate.plugins.deepspeed import (
    DeepSpeedPlugin as DeepSpeedPlugin,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from accelerate.plugins.deepspeed_config import (
    AutoValues as AutoValues,
    HfDeepSpeedConfig as HfDeepSpeedConfig,
    restore_auto as restore_auto,
)
from accelerate.plugins.fsdp import (
    EFFICIENT_LOADING as EFFICIENT_LOADING,
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    bind_policy as bind_policy,
    find_units as find_units,
    get_module_class_from_name as get_module_class_from_name,
    read_policy as read_policy,
)
from accelerate.plugins.fsdp_versions import version_of as version_of
from accelerate.plugins.handlers import (
    AutocastKwargs as AutocastKwargs,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs,
)
from accelerate.plugins.low_precision import (
    AORecipeKwargs as AORecipeKwargs,
    BnbQuantizationConfig as BnbQuantizationConfig,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    TERecipeKwargs as TERecipeKwargs,
)
from accelerate.plugins.megatron import (
    MegatronLMPlugin as MegatronLMPlugin,
    find_wrong_values as find_wrong_values,
)
from accelerate.plugins.megatron_models import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    find_wrong_network as find_wrong_network,
    find_wrong_sizes as find_wrong_sizes,
    parse_bert_config as parse_bert_config,
    parse_glm4_moe_config as parse_glm4_moe_config,
    parse_gpt2_config as parse_gpt2_config,
    parse_llama_config as parse_llama_config,
    parse_t5_config as parse_t5_config,
)
from accelerate.plugins.training import (
    SCHEDULES as SCHEDULES,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig as ExpertParallelConfig,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    PipelineConfig as PipelineConfig,
    ProjectConfiguration as ProjectConfiguration,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchDynamoPlugin as TorchDynamoPlugin,
    TorchSequenceParallelConfig as TorchSequenceParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
