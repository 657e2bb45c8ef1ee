"""Arguments of tensor, context and sequence parallelism."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate.base import ConfigurationError
from accelerate.plugins.checks import at_least, fill_from, one_of
from accelerate.settings.sections import ContextParallelSection, SequenceParallelSection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COMM_STRATEGIES = ("allgather", "alltoall")
ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")


@dataclass
class TorchTensorParallelPlugin:
    """How many processes share each layer, as older scripts say it.

    Args:
        tp_size: Number of processes.
        torch_device_mesh: The mesh of those processes; None lets it be built.

    Raises:
        ConfigurationError: Fewer than one process.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        at_least("tp_size", self.tp_size, 1)


@dataclass
class TorchTensorParallelConfig:
    """Details of tensor parallelism.

    Args:
        enable_async_tp: Kept for the interface; communication is not overlapped with computation.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: tensor parallelism does not overlap its communication.",
                stacklevel=3,
            )


@dataclass
class TorchContextParallelConfig:
    """Details of context parallelism.

    Args:
        cp_comm_strategy: How keys and values are exchanged: "allgather" (all at once) or "alltoall" (around a
            ring). From PARALLELISM_CONFIG_CP_COMM_STRATEGY, otherwise "allgather".

    Raises:
        ConfigurationError: Another strategy.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        fill_from(self, ContextParallelSection, "parallelism_config_")
        one_of("cp_comm_strategy", self.cp_comm_strategy, COMM_STRATEGIES)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Details of Ulysses sequence parallelism.

    What is not given is read from the environment when the object is built.

    Args:
        sp_seq_length: Length of the sequences. From PARALLELISM_CONFIG_SP_SEQ_LENGTH.
        sp_seq_length_is_variable: Whether batches differ in length. From
            PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE, otherwise yes.
        sp_attn_implementation: "sdpa", "flash_attention_2" or "flash_attention_3". From
            PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION, otherwise "sdpa".

    Raises:
        ConfigurationError: Another attention, or a fixed length that is not given.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        fill_from(self, SequenceParallelSection, "parallelism_config_")
        one_of("sp_attn_implementation", self.sp_attn_implementation, ATTENTIONS)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                "sp_seq_length_is_variable=False: the length is not given. Give sp_seq_length too, or leave "
                "sp_seq_length_is_variable out."
            )
