"""Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import Section, option, optional, true_or_false, unless_empty


@dataclass(frozen=True, kw_only=True)
class MegatronSection(Section):
    """Degrees of parallelism, recomputation and optimizer of Megatron-LM."""

    title = "Megatron-LM Arguments"
    file_key = "megatron_lm_config"
    switch = "--use_megatron_lm"
    env_prefix = ""
    takes_words = True
    spell_optional = unless_empty

    megatron_lm_tp_degree: int = option(
        1, "Processes that share each layer (tensor parallelism).", ask="What is the tensor-parallel degree?"
    )
    megatron_lm_use_custom_fsdp: bool = option(
        False, "Use Megatron's own FSDP (true or false).", flag_type=true_or_false
    )
    megatron_lm_no_load_optim: bool = option(
        False, "Do not load the optimizer from a checkpoint (true or false).", flag_type=true_or_false
    )
    megatron_lm_eod_mask_loss: bool = option(
        False, "Leave end-of-document tokens out of the loss (true or false).", flag_type=true_or_false
    )
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = option(
        False,
        "Overlap the copies of an optimizer on the CPU with its step (true or false).",
        flag_type=true_or_false,
    )
    megatron_lm_no_save_optim: bool = option(
        False, "Do not save the optimizer in checkpoints (true or false).", flag_type=true_or_false
    )
    megatron_lm_optimizer_cpu_offload: bool = option(
        False, "Keep the optimizer on the CPU (true or false).", flag_type=true_or_false
    )
    megatron_lm_use_precision_aware_optimizer: bool = option(
        False, "Keep optimizer states in low precision (true or false).", flag_type=true_or_false
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = optional(
        "Layers of the last pipeline stage, where it differs from the others."
    )
    megatron_lm_pp_degree: int = option(1, "Pipeline stages.", ask="How many pipeline stages?")
    megatron_lm_num_micro_batches: int | None = optional(
        "Micro-batches per batch in a pipeline.",
        ask="How many micro-batches per batch?",
        when=lambda answers: answers["megatron_lm_pp_degree"] > 1,
    )
    megatron_lm_sequence_parallelism: bool | None = optional(
        "Split the sequence where layers are not split (true or false).",
        ask=True,
        when=lambda answers: answers["megatron_lm_tp_degree"] > 1,
    )
    megatron_lm_recompute_activations: bool | None = optional(
        "Recompute activations in backward (true or false).",
        ask="Recompute activations in the backward of Megatron-LM to save memory?",
    )
    megatron_lm_use_distributed_optimizer: bool | None = optional(
        "Shard optimizer states over data-parallel processes (true or false).", ask=True
    )
    megatron_lm_gradient_clipping: float = option(
        1.0,
        "Largest norm of the gradients; 0 for no limit.",
        ask="What is the largest norm of the gradients (0 for no limit)?",
    )
    megatron_lm_recompute_granularity: str | None = optional("What is recomputed: full or selective.")
    megatron_lm_recompute_method: str | None = optional("How recomputed layers are chosen: uniform or block.")
    megatron_lm_recompute_num_layers: int | None = optional("Layers recomputed together.")
    megatron_lm_attention_backend: str | None = optional(
        "Attention kernel: flash, fused, unfused, local or auto."
    )
    megatron_lm_expert_model_parallel_size: int | None = optional(
        "Processes that share the experts of a layer."
    )
    megatron_lm_context_parallel_size: int | None = optional("Processes that share each sequence.")
    megatron_lm_attention_dropout: float | None = optional("Dropout of attention weights.")
    megatron_lm_hidden_dropout: float | None = optional("Dropout of hidden states.")
    megatron_lm_attention_softmax_in_fp32: bool | None = optional(
        "Compute the softmax of attention in float32 (true or false)."
    )
    megatron_lm_expert_tensor_parallel_size: int | None = optional("Processes that share each expert.")
    megatron_lm_calculate_per_token_loss: bool | None = optional(
        "Average the loss over tokens instead of sequences (true or false)."
    )
    megatron_lm_use_rotary_position_embeddings: bool | None = optional(
        "Rotary position embeddings (true or false)."
    )
