"""Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.settings.option import Section, option, true_or_false, unless_empty


@dataclass(frozen=True, kw_only=True)
class MegatronSection(Section):
    """Degrees of parallelism, recomputation and optimizer of Megatron-LM."""

    title = "Megatron-LM Arguments"
    file_key = "megatron_lm_config"
    switch = "--use_megatron_lm"
    megatron_lm_tp_degree: int = option(
        1,
        "Processes that share each layer (tensor parallelism).",
        ask="What is the tensor-parallel degree?",
        env="MEGATRON_LM_TP_DEGREE",
    )
    megatron_lm_use_custom_fsdp: bool = option(
        False,
        "Use Megatron's own FSDP (true or false).",
        flag_type=true_or_false,
        env="MEGATRON_LM_USE_CUSTOM_FSDP",
    )
    megatron_lm_no_load_optim: bool = option(
        False,
        "Do not load the optimizer from a checkpoint (true or false).",
        flag_type=true_or_false,
        env="MEGATRON_LM_NO_LOAD_OPTIM",
    )
    megatron_lm_eod_mask_loss: bool = option(
        False,
        "Leave end-of-document tokens out of the loss (true or false).",
        flag_type=true_or_false,
        env="MEGATRON_LM_EOD_MASK_LOSS",
    )
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = option(
        False,
        "Overlap the copies of an optimizer on the CPU with its step (true or false).",
        flag_type=true_or_false,
        env="MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D",
    )
    megatron_lm_no_save_optim: bool = option(
        False,
        "Do not save the optimizer in checkpoints (true or false).",
        flag_type=true_or_false,
        env="MEGATRON_LM_NO_SAVE_OPTIM",
    )
    megatron_lm_optimizer_cpu_offload: bool = option(
        False,
        "Keep the optimizer on the CPU (true or false).",
        flag_type=true_or_false,
        env="MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD",
    )
    megatron_lm_use_precision_aware_optimizer: bool = option(
        False,
        "Keep optimizer states in low precision (true or false).",
        flag_type=true_or_false,
        env="MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER",
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = option(
        None,
        "Layers of the last pipeline stage, where it differs from the others.",
        env="MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS",
        spell=unless_empty,
    )
    megatron_lm_pp_degree: int = option(
        1,
        "Pipeline stages.",
        ask="How many pipeline stages?",
        env="MEGATRON_LM_PP_DEGREE",
    )
    megatron_lm_num_micro_batches: int | None = option(
        None,
        "Micro-batches per batch in a pipeline.",
        ask="How many micro-batches per batch?",
        env="MEGATRON_LM_NUM_MICRO_BATCHES",
        spell=unless_empty,
        when=lambda answers: answers["megatron_lm_pp_degree"] > 1,
    )
    megatron_lm_sequence_parallelism: bool | None = option(
        None,
        "Split the sequence where layers are not split (true or false).",
        text_flag=True,
        env="MEGATRON_LM_SEQUENCE_PARALLELISM",
        spell=unless_empty,
        ask="Split the sequence where layers are not split?",
        when=lambda answers: answers["megatron_lm_tp_degree"] > 1,
    )
    megatron_lm_recompute_activations: bool | None = option(
        None,
        "Recompute activations in backward (true or false).",
        text_flag=True,
        env="MEGATRON_LM_RECOMPUTE_ACTIVATIONS",
        spell=unless_empty,
        ask="Recompute activations in the backward of Megatron-LM to save memory?",
    )
    megatron_lm_use_distributed_optimizer: bool | None = option(
        None,
        "LocalShards optimizer states over data-parallel processes (true or false).",
        text_flag=True,
        env="MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
        spell=unless_empty,
        ask="LocalShards optimizer states over data-parallel processes?",
    )
    megatron_lm_gradient_clipping: float = option(
        1.0,
        "Largest norm of the gradients; 0 for no limit.",
        ask="What is the largest norm of the gradients (0 for no limit)?",
        env="MEGATRON_LM_GRADIENT_CLIPPING",
    )
    megatron_lm_recompute_granularity: str | None = option(
        None,
        "What is recomputed: full or selective.",
        env="MEGATRON_LM_RECOMPUTE_GRANULARITY",
        spell=unless_empty,
    )
    megatron_lm_recompute_method: str | None = option(
        None,
        "How recomputed layers are chosen: uniform or block.",
        env="MEGATRON_LM_RECOMPUTE_METHOD",
        spell=unless_empty,
    )
    megatron_lm_recompute_num_layers: int | None = option(
        None,
        "Layers recomputed together.",
        env="MEGATRON_LM_RECOMPUTE_NUM_LAYERS",
        spell=unless_empty,
    )
    megatron_lm_attention_backend: str | None = option(
        None,
        "Attention kernel: flash, fused, unfused, local or auto.",
        env="MEGATRON_LM_ATTENTION_BACKEND",
        spell=unless_empty,
    )
    megatron_lm_expert_model_parallel_size: int | None = option(
        None,
        "Processes that share the experts of a layer.",
        env="MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE",
        spell=unless_empty,
    )
    megatron_lm_context_parallel_size: int | None = option(
        None,
        "Processes that share each sequence.",
        env="MEGATRON_LM_CONTEXT_PARALLEL_SIZE",
        spell=unless_empty,
    )
    megatron_lm_attention_dropout: float | None = option(
        None,
        "Dropout of attention weights.",
        env="MEGATRON_LM_ATTENTION_DROPOUT",
        spell=unless_empty,
    )
    megatron_lm_hidden_dropout: float | None = option(
        None,
        "Dropout of hidden states.",
        env="MEGATRON_LM_HIDDEN_DROPOUT",
        spell=unless_empty,
    )
    megatron_lm_attention_softmax_in_fp32: bool | None = option(
        None,
        "Compute the softmax of attention in float32 (true or false).",
        text_flag=True,
        env="MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32",
        spell=unless_empty,
    )
    megatron_lm_expert_tensor_parallel_size: int | None = option(
        None,
        "Processes that share each expert.",
        env="MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE",
        spell=unless_empty,
    )
    megatron_lm_calculate_per_token_loss: bool | None = option(
        None,
        "Average the loss over tokens instead of sequences (true or false).",
        text_flag=True,
        env="MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS",
        spell=unless_empty,
    )
    megatron_lm_use_rotary_position_embeddings: bool | None = option(
        None,
        "Rotary position embeddings (true or false).",
        text_flag=True,
        env="MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS",
        spell=unless_empty,
    )

    @staticmethod
    def active(values: Mapping[str, Any]) -> bool:
        """Only when Megatron-LM is the way of training."""
        return bool(values["use_megatron_lm"])
