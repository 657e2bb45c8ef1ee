"""Sections for DeepSpeed, FSDP, Megatron-LM, and the device mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from accelerate.base import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate.settings.option import (
    Section,
    as_text,
    lower,
    lower_bool,
    option,
    optional,
    true_or_false,
    unless_empty,
    unless_empty_lower,
)
from accelerate.settings.sections.launch import several_machines

OffloadDevice: TypeAlias = Literal["none", "cpu", "nvme"]
DEVICES = get_args(OffloadDevice)


def _without_own_file(answers: Mapping[str, Any]) -> bool:
    return not answers["deepspeed_config_file"]


_inline_option = partial(optional, when=_without_own_file)
_zero3_option = partial(
    optional, when=lambda answers: _without_own_file(answers) and answers["zero_stage"] == 3
)
_hostfile_option = partial(
    optional,
    env=(),
    when=lambda answers: several_machines(answers) and answers["deepspeed_multinode_launcher"] != "standard",
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSection(Section):
    """ZeRO stage, offloading, and the launch of DeepSpeed on several nodes."""

    title = "DeepSpeed Arguments"
    file_key = "deepspeed_config"
    switch = "--use_deepspeed"
    env_prefix = "ACCELERATE_DEEPSPEED_"
    takes_words = True
    encode_optional = unless_empty_lower

    deepspeed_config_file: str | None = optional(
        "DeepSpeed's own JSON configuration; its values win over the flags of this group.",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        encode=unless_empty,
        ask="Path of DeepSpeed's JSON configuration (empty for none)?",
    )
    zero_stage: int | None = _inline_option(
        "ZeRO stage: 0, 1, 2 or 3.",
        encode=as_text,
        limits=(0, 3),
        ask="Which ZeRO stage?",
        offers=("0", "1", "2", "3"),
    )
    offload_optimizer_device: str | None = optional(
        "Where optimizer states are kept: none, cpu or nvme.",
        ask="Where are optimizer states kept?",
        offers=DEVICES,
        when=lambda answers: _without_own_file(answers) and (answers["zero_stage"] or 0) >= 2,
    )
    offload_param_device: str | None = _zero3_option(
        "Where parameters are kept: none, cpu or nvme.", ask="Where are parameters kept?", offers=DEVICES
    )
    offload_optimizer_nvme_path: str | None = optional(
        "Folder on NVMe for optimizer states.",
        encode=unless_empty,
        ask="Which folder on NVMe for optimizer states?",
        when=lambda answers: answers["offload_optimizer_device"] == "nvme",
    )
    offload_param_nvme_path: str | None = optional(
        "Folder on NVMe for parameters.",
        encode=unless_empty,
        ask="Which folder on NVMe for parameters?",
        when=lambda answers: answers["offload_param_device"] == "nvme",
    )
    gradient_accumulation_steps: int | None = _inline_option(
        "Batches per optimizer step, with DeepSpeed; else Accelerator(gradient_accumulation_steps=...).",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ask="How many batches per optimizer step?",
    )
    gradient_clipping: float | None = _inline_option(
        "Largest norm of the gradients.",
        env="ACCELERATE_GRADIENT_CLIPPING",
        ask="What is the largest norm of the gradients (empty for no limit)?",
    )
    zero3_init_flag: bool | None = _zero3_option(
        "ZeRO-3: build models sharded from the start (true or false).",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ask=True,
    )
    zero3_save_16bit_model: bool | None = _zero3_option(
        "ZeRO-3: gather 16-bit weights when saving (true or false).", ask=True
    )
    deepspeed_multinode_launcher: str | None = optional(
        f"What starts processes on several machines: {', '.join(DEEPSPEED_MULTINODE_LAUNCHERS)}.",
        env=(),
        ask="What starts processes on several machines?",
        offers=tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
        when=several_machines,
    )
    deepspeed_hostfile: str | None = _hostfile_option(
        "DeepSpeed's host file for several machines.", ask="Where is the host file (empty for none)?"
    )
    deepspeed_exclusion_filter: str | None = _hostfile_option(
        "Hosts and devices that are left out.", ask="Which hosts and devices are left out (empty for none)?"
    )
    deepspeed_inclusion_filter: str | None = _hostfile_option(
        "Hosts and devices that are used.", ask="Which hosts and devices are used (empty for all)?"
    )
    deepspeed_moe_layer_cls_names: str | None = _zero3_option(
        "Class names of mixture-of-experts layers that ZeRO-3 must not enter, separated by commas.",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        field="transformer_moe_cls_names",
        encode=unless_empty,
        ask="Class names of mixture-of-experts layers that ZeRO-3 must not enter (empty for none)?",
        advanced=True,
    )


_fsdp1_option = partial(option, when=lambda answers: answers["fsdp_version"] == 1)


@dataclass(frozen=True, kw_only=True)
class FsdpSection(Section):
    """Sharding of a model."""

    title = "FSDP Arguments"
    file_key = "fsdp_config"
    field_prefix = "fsdp_"
    switch = "--use_fsdp"
    env_prefix = ""
    takes_words = True
    encode = lower_bool
    encode_optional = unless_empty

    fsdp_version: int = option(
        1,
        "Version of FSDP: 1 or 2.",
        choices=("1", "2"),
        field="fsdp_version",
        flag_default="1",
        flag_type=str,
        ask="Which version of FSDP?",
    )
    fsdp_offload_params: bool = option(
        False, "Keep parameters and gradients on the CPU (true or false).", field="cpu_offload", ask=True
    )
    fsdp_min_num_params: int = option(
        100_000_000,
        "SIZE_BASED_WRAP: modules with at least this many parameters become a unit.",
        limits=(0, 10**15),
        ask="How many parameters has a unit at least?",
        when=lambda answers: answers["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP",
    )
    fsdp_sharding_strategy: str = _fsdp1_option(
        "FULL_SHARD",
        "FSDP 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or their numbers.",
        ask="What is sharded?",
        offers=tuple(FSDP_SHARDING_STRATEGY),
        words=(*FSDP_SHARDING_STRATEGY, *"12345"),
    )
    fsdp_reshard_after_forward: str = option(
        "true",
        "Free the parameters between forward and backward: true or false with FSDP 2, a sharding strategy "
        "with FSDP 1.",
        encode=lower,
        ask="Free the parameters between forward and backward?",
        offers=("true", "false"),
        when=lambda answers: answers["fsdp_version"] == 2,
    )
    fsdp_auto_wrap_policy: str | None = optional(
        "How the model is cut into units: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP.",
        ask="How is the model cut into units?",
        offers=tuple(FSDP_AUTO_WRAP_POLICY),
        words=tuple(FSDP_AUTO_WRAP_POLICY),
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = optional(
        "TRANSFORMER_BASED_WRAP: class names of the layers that become units, separated by commas.",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        field="transformer_cls_names_to_wrap",
        ask="Which layer classes become units (separated by commas, empty: what the model says)?",
        when=lambda answers: answers["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP",
    )
    fsdp_backward_prefetch: str | None = _fsdp1_option(
        None,
        "FSDP 1: when the next unit is fetched in backward: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH.",
        ask="When is the next unit fetched in backward?",
        offers=tuple(FSDP_BACKWARD_PREFETCH),
        words=tuple(FSDP_BACKWARD_PREFETCH),
    )
    fsdp_state_dict_type: str | None = optional(
        "How checkpoints are written: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT.",
        ask="How are checkpoints written?",
        offers=tuple(FSDP_STATE_DICT_TYPE),
        words=tuple(FSDP_STATE_DICT_TYPE),
    )
    fsdp_forward_prefetch: bool = _fsdp1_option(
        False, "FSDP 1: fetch the next unit during forward (true or false).", ask=True
    )
    fsdp_use_orig_params: bool = _fsdp1_option(
        True, "FSDP 1: keep the model's own parameters, so that some can be frozen (true or false).", ask=True
    )
    fsdp_cpu_ram_efficient_loading: bool = option(
        True,
        "Only the first process reads pretrained weights (true or false).",
        ask="Let only the first process read pretrained weights?",
    )
    fsdp_sync_module_states: bool = _fsdp1_option(
        True,
        "FSDP 1: every unit starts from the weights of rank 0 (true or false).",
        ask="Start every unit from the weights of rank 0?",
    )
    fsdp_activation_checkpointing: bool = option(
        False,
        "Recompute activations in backward instead of keeping them (true or false).",
        ask="Recompute activations in backward to save memory?",
    )
    fsdp_activation_checkpointing_offload: bool = option(
        False, "Keep checkpointed activations on the CPU (true or false)."
    )
    fsdp_ignored_modules: str | None = optional(
        "Modules that are not sharded: a regular expression over their names.", flags=()
    )


_flag = partial(option, False, flag_type=true_or_false)


@dataclass(frozen=True, kw_only=True)
class MegatronSection(Section):
    """Degrees of parallelism, recomputation and optimizer of Megatron-LM."""

    title = "Megatron-LM Arguments"
    file_key = "megatron_lm_config"
    field_prefix = "megatron_lm_"
    switch = "--use_megatron_lm"
    env_prefix = ""
    takes_words = True
    encode_optional = unless_empty

    megatron_lm_tp_degree: int = option(
        1, "Processes that share each layer (tensor parallelism).", ask="What is the tensor-parallel degree?"
    )
    megatron_lm_use_custom_fsdp: bool = _flag("Use Megatron's own FSDP (true or false).")
    megatron_lm_no_load_optim: bool = _flag("Do not load the optimizer from a checkpoint (true or false).")
    megatron_lm_eod_mask_loss: bool = _flag("Leave end-of-document tokens out of the loss (true or false).")
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = _flag(
        "Overlap the copies of an optimizer on the CPU with its step (true or false)."
    )
    megatron_lm_no_save_optim: bool = _flag("Do not save the optimizer in checkpoints (true or false).")
    megatron_lm_optimizer_cpu_offload: bool = _flag("Keep the optimizer on the CPU (true or false).")
    megatron_lm_use_precision_aware_optimizer: bool = _flag(
        "Keep optimizer states in low precision (true or false)."
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


MESH_SIZES = (1, 10**6)
"""Limits of the size of a dimension of the mesh."""
PP_SCHEDULES = (
    *("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble"),
    "dualpipev",
)
"""Names of pipeline schedules, whose properties `plugins.training` has."""


class _MeshSection(Section):
    title = "ParallelismConfig Arguments"
    file_key = "parallelism_config"
    field_prefix = "parallelism_config_"
    switch = "--use_parallelism_config"
    env_prefix = ""
    size: ClassVar[str] = ""  # option with the size of its dimension, or empty for all dimensions

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Returns whether the mesh has the dimension of the section."""
        return bool(values["use_parallelism_config"]) and (not cls.size or (values[cls.size] or 1) > 1)


@dataclass(frozen=True, kw_only=True)
class ParallelismSection(_MeshSection):
    """Sizes of the dimensions of the device mesh."""

    parallelism_config_pp_size: int | None = optional(
        "Processes that share the layers of a model (pipeline parallelism).",
        ask="How many processes share the layers of the model (pipeline parallelism)?",
        limits=MESH_SIZES,
    )
    parallelism_config_ep_size: int | None = optional(
        "Processes that share the experts of each layer (expert parallelism).", limits=MESH_SIZES
    )
    parallelism_config_dp_replicate_size: int = option(
        1,
        "Groups of processes that hold a whole copy of the model.",
        ask="How many groups hold a whole copy of the model?",
        limits=MESH_SIZES,
    )
    parallelism_config_dp_shard_size: int = option(
        1,
        "Processes that share one copy of the model (FSDP).",
        ask="How many processes share one copy of the model?",
        limits=MESH_SIZES,
    )
    parallelism_config_tp_size: int = option(
        1,
        "Processes that share each layer (tensor parallelism).",
        ask="How many processes share each layer (tensor parallelism)?",
        limits=MESH_SIZES,
    )
    parallelism_config_cp_size: int = option(
        1,
        "Processes that share each sequence (context parallelism).",
        ask="How many processes share each sequence (context parallelism)?",
        limits=MESH_SIZES,
    )
    parallelism_config_cp_backend: str = option(
        "torch", "Implementation of context parallelism.", choices=("torch",)
    )
    parallelism_config_sp_size: int = option(
        1, "Processes that share each sequence (Ulysses).", limits=MESH_SIZES
    )
    parallelism_config_sp_backend: str = option(
        "deepspeed", "Implementation of sequence parallelism.", choices=("deepspeed", "torch")
    )


@dataclass(frozen=True, kw_only=True)
class PipelineSection(_MeshSection):
    """Details of pipeline parallelism."""

    size = "parallelism_config_pp_size"
    switch = f"--{size} above 1"

    parallelism_config_pp_schedule: str = option(
        "1f1b",
        f"Order of the passes of micro-batches: {', '.join(PP_SCHEDULES[:-1])} or {PP_SCHEDULES[-1]}.",
        words=PP_SCHEDULES,
    )
    parallelism_config_pp_microbatches: int = option(
        8, "Micro-batches into which a pipeline splits a batch.", limits=(1, 10**6)
    )


@dataclass(frozen=True, kw_only=True)
class ContextParallelSection(_MeshSection):
    """Details of context parallelism."""

    size = "parallelism_config_cp_size"
    switch = f"--{size} above 1"

    parallelism_config_cp_comm_strategy: str = option(
        "allgather",
        "How context parallelism exchanges keys and values: allgather or alltoall.",
        ask="How does context parallelism exchange keys and values?",
        offers=("allgather", "alltoall"),
        words=("allgather", "alltoall"),
    )


@dataclass(frozen=True, kw_only=True)
class SequenceParallelSection(_MeshSection):
    """Details of Ulysses sequence parallelism."""

    size = "parallelism_config_sp_size"
    switch = f"--{size} above 1"

    parallelism_config_sp_seq_length: int | None = optional(
        "Length of the sequences, where all have the same.", flag_type=str, encode=str
    )
    parallelism_config_sp_seq_length_is_variable: bool = option(
        True, "Sequences have different lengths (true or false).", flag_type=true_or_false
    )
    parallelism_config_sp_attn_implementation: str = option(
        "sdpa",
        "Attention used with sequence parallelism: sdpa, flash_attention_2 or flash_attention_3.",
        offers=("sdpa", "flash_attention_2", "flash_attention_3"),
    )
