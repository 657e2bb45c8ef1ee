"""The mesh: how many processes along which axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.settings.option import Section, option, optional, true_or_false

TITLE = "ParallelismConfig Arguments"
FILE_KEY = "parallelism_config"


@dataclass(frozen=True, kw_only=True)
class ParallelismSection(Section):
    """Sizes of the axes of the mesh."""

    title = TITLE
    file_key = FILE_KEY
    switch = "--use_parallelism_config"
    env_prefix = ""

    parallelism_config_dp_replicate_size: int = option(
        1,
        "Groups of processes that hold a whole copy of the model.",
        ask="How many groups hold a whole copy of the model?",
    )
    parallelism_config_dp_shard_size: int = option(
        1,
        "Processes that share one copy of the model (FSDP).",
        ask="How many processes share one copy of the model?",
    )
    parallelism_config_tp_size: int = option(
        1,
        "Processes that share each layer (tensor parallelism).",
        ask="How many processes share each layer (tensor parallelism)?",
    )
    parallelism_config_cp_size: int = option(
        1,
        "Processes that share each sequence (context parallelism).",
        ask="How many processes share each sequence (context parallelism)?",
    )
    parallelism_config_cp_backend: str = option(
        "torch", "Implementation of context parallelism.", choices=("torch",)
    )
    parallelism_config_sp_size: int = option(1, "Processes that share each sequence (Ulysses).")
    parallelism_config_sp_backend: str = option(
        "deepspeed", "Implementation of sequence parallelism.", choices=("deepspeed",)
    )


@dataclass(frozen=True, kw_only=True)
class ContextParallelSection(Section):
    """Details of context parallelism."""

    title = TITLE
    file_key = FILE_KEY
    switch = "--parallelism_config_cp_size above 1"
    env_prefix = ""

    parallelism_config_cp_comm_strategy: str = option(
        "allgather",
        "How context parallelism exchanges keys and values: allgather or alltoall.",
        ask="How does context parallelism exchange keys and values?",
        offers=("allgather", "alltoall"),
    )

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Only when sequences are split over a context-parallel axis."""
        return ParallelismSection.active(values) and values["parallelism_config_cp_size"] > 1


@dataclass(frozen=True, kw_only=True)
class SequenceParallelSection(Section):
    """Details of Ulysses sequence parallelism."""

    title = TITLE
    file_key = FILE_KEY
    switch = "--parallelism_config_sp_size above 1"
    env_prefix = ""

    parallelism_config_sp_seq_length: int | None = optional(
        "Length of the sequences, where all have the same.", flag_type=str, spell=str
    )
    parallelism_config_sp_seq_length_is_variable: bool = option(
        True, "Sequences have different lengths (true or false).", flag_type=true_or_false
    )
    parallelism_config_sp_attn_implementation: str = option(
        "sdpa", "Attention used with sequence parallelism: sdpa, flash_attention_2 or flash_attention_3."
    )

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Only when sequences are split over a sequence-parallel axis."""
        return ParallelismSection.active(values) and values["parallelism_config_sp_size"] > 1
