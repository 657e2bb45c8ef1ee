from typing import TYPE_CHECKING as TYPE_CHECKING

from accelerate.base import (
    BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
    FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION,
    FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY,
    BaseEnum as BaseEnum,
    EnumWithContains as EnumWithContains,
    FP8BackendType as FP8BackendType,
)
from accelerate.plugins import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    get_module_class_from_name as get_module_class_from_name,
    parse_bert_config as parse_bert_config,
    parse_glm4_moe_config as parse_glm4_moe_config,
    parse_gpt2_config as parse_gpt2_config,
    parse_llama_config as parse_llama_config,
    parse_t5_config as parse_t5_config,
)
from accelerate.utils import *
