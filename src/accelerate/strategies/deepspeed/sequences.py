"""Ulysses sequence parallelism: the processes of one axis share each sequence, and each attention's heads.

Source: https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism/
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from accelerate.base import PreparationError
from accelerate.nested import send_to_device
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.bundle import mark_prepared
from accelerate.strategies.deepspeed.values import MICRO


class WholeSequences:
    """Each process has whole sequences."""

    size = 1

    def join(self, model: Any, config: Mapping[str, Any]) -> Any:
        """Return no groups."""
        return None

    def share(self, loader: Any, model: Any) -> Any:
        """Return the very loader."""
        return loader


class SharedSequences(WholeSequences):
    """Processes share sequences, by DeepSpeed's attention for transformers' models.

    Args:
        mesh: with an axis for it.
    """

    def __init__(self, mesh: ParallelismConfig) -> None:
        self.size = int(mesh.sp_size or 1)
        self._handler: Any = mesh.sp_handler
        self._groups: Any = None

    def join(self, model: Any, config: Mapping[str, Any]) -> Any:
        """Let the attention of a model reach over all processes of its group; called on all ranks.

        Args:
            model: one of transformers'.
            config: of DeepSpeed, complete.

        Returns:
            Which processes are in which group.

        Raises:
            PreparationError: its attention cannot be shared.
        """
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        handler = self._handler
        check_attention(model, self.size, handler.sp_attn_implementation)
        if self._groups is not None:
            raise PreparationError(
                "A second model with sp_size > 1: DeepSpeed keeps one attention for all models of a process. "
                "Prepare one model only."
            )
        self._groups = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=handler.sp_attn_implementation,
            sequence_parallel_size=self.size,
            micro_batch_size=config.get(MICRO, 1),
            seq_length=handler.sp_seq_length,
            seq_length_is_variable=handler.sp_seq_length_is_variable,
        )
        return self._groups

    def share(self, loader: Any, model: Any) -> Any:
        """Return a loader that gives each process its part of the sequences of all processes in its group.

        Args:
            loader: prepared; gives dictionaries with input_ids, position_ids and labels.
            model: prepared, whose device batches go to.
        """
        if self._groups is None:
            raise PreparationError("Loaders share sequences after the model: prepare the model first.")
        groups = self._groups
        return mark_prepared(
            loader_class()(
                loader,
                sp_rank=groups.get_sequence_parallel_rank(),
                sp_group=groups.get_sequence_parallel_group(),
                sp_world_size=groups.get_sequence_parallel_world_size(),
                device=model.device,
            )
        )


def check_attention(model: Any, size: int, attention: str) -> None:
    """Refuse a model whose attention cannot be shared.

    Args:
        model: to be prepared.
        size: number of processes that share a sequence.
        attention: which one is asked for.

    Raises:
        PreparationError: with the fix.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None:
        raise PreparationError(
            f"{kind} has no `config`: sp_size={size} shares the attention of transformers' models only. Set "
            "sp_size=1, or cp_size for other models."
        )
    found = getattr(config, "_attn_implementation", None)
    if found not in (None, attention):
        raise PreparationError(
            f"{kind} computes attention by {found!r}, and sp_attn_implementation is {attention!r}. Load it "
            f"with attn_implementation={attention!r}, or set sp_attn_implementation={found!r}."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", size)
    if heads % size:
        raise PreparationError(
            f"{kind} has {heads} attention heads, which sp_size={size} processes cannot share evenly. "
            "Choose a size that divides them."
        )


@cache
def loader_class() -> type[Any]:
    """Return DeepSpeed's adapter, whose batches come to the device and which tells its end to the run."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    class SequenceLoader(UlyssesSPDataLoaderAdapter):  # type: ignore[misc]  # DeepSpeed is not typed
        """Parts of sequences for this process."""

        _ends = False

        def refill(self) -> None:
            super().refill()
            self._ends = bool(getattr(self.dl, "end_of_dataloader", False))

        def __next__(self) -> Any:
            batch = super().__next__()
            if self._ends:  # the loader below has ended a round of parts ago
                self.dl.end_of_dataloader = not self.micro_batches
            return send_to_device(batch, self.device)

    return SequenceLoader


def sequences_of(mesh: ParallelismConfig | None) -> WholeSequences:
    """Return how sequences are shared in a run.

    Args:
        mesh: of the run; None without one.
    """
    return SharedSequences(mesh) if mesh is not None and mesh.sp_enabled else WholeSequences()
