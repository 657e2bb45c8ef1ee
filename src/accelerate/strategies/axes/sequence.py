"""The axis along which ranks share each sequence: its interface, and Ulysses sequence parallelism.

Source: https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from torch import Tensor, nn

from accelerate.base import PreparationError
from accelerate.nested import send_to_device
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.session import mark_prepared


class Axis:
    """Ranks that share each sequence; the base class is one rank, which has whole sequences.

    All ranks call the same methods in the same order: `transform` for each model before it is wrapped,
    `transform_loader` for each loader after its model, `batch` around forward and backward.
    """

    size: int = 1
    splits_buffers: bool = False  # whether `batch` splits tensors of the training loop
    groups: Any = None  # process groups as an engine takes them; None where torch's mesh has them

    def transform(self, models: Iterable[nn.Module], micro_batch_size: int = 1) -> None:
        """Let models share sequences of batches with so many samples on a rank, in place, before wrapping."""

    def transform_loader(self, loader: Any, model: Any) -> Any:
        """Return a loader that gives this rank its part of each batch; the very one without an axis."""
        return loader

    def batch(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context for forward and backward in which this rank holds its part of the sequences.

        Buffers are equal on all ranks, and split in place; those named last need not be whole afterwards.
        """
        return nullcontext()


def resolve_sequence_axis(parallelism: ParallelismConfig | None, mesh: Any) -> Axis:
    """Return the axis along which ranks share each sequence."""
    if parallelism is not None and parallelism.cp_enabled:
        from accelerate.strategies.axes.context import ContextAxis

        return ContextAxis(mesh, parallelism.cp_handler)
    if parallelism is not None and parallelism.sp_enabled:
        return SequenceAxis(parallelism.sp_size, parallelism.sp_handler)
    return Axis()


class SequenceAxis(Axis):
    """Splits sequences over the ranks of an axis, by DeepSpeed's attention for transformers' models."""

    def __init__(self, size: int | None, handler: Any) -> None:
        self.size = int(size or 1)
        self._handler = handler

    def transform(self, models: Iterable[Any], micro_batch_size: int = 1) -> None:
        """Let the attention of a model of transformers reach over all ranks of its group."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        handler = self._handler
        for model in models:
            check_attention(model, self.size, handler.sp_attn_implementation)
            if self.groups is not None:
                raise PreparationError(
                    "A second model with sp_size > 1: DeepSpeed keeps one attention for all models of a "
                    "process. Prepare one model only."
                )
            self.groups = UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=model,
                core_attn_implementation=handler.sp_attn_implementation,
                sequence_parallel_size=self.size,
                micro_batch_size=micro_batch_size,
                seq_length=handler.sp_seq_length,
                seq_length_is_variable=handler.sp_seq_length_is_variable,
            )

    def transform_loader(self, loader: Any, model: Any) -> Any:
        """Return a loader that gives each rank its part of input_ids, position_ids and labels."""
        if self.groups is None:
            raise PreparationError("Loaders share sequences after the model: prepare the model first.")
        groups = self.groups
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
    """Refuse a model whose attention ranks cannot share."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None:
        raise PreparationError(
            f"{kind} has no `config`: sp_size={size} shares the attention of transformers' models only. Set "
            "sp_size=1, or cp_size for other models."
        )
    chosen = getattr(config, "_attn_implementation", None)
    if chosen not in (None, attention):
        raise PreparationError(
            f"{kind} computes attention by {chosen!r}, and sp_attn_implementation is {attention!r}. Load it "
            f"with attn_implementation={attention!r}, or set sp_attn_implementation={chosen!r}."
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
    """Return DeepSpeed's adapter, with batches moved to the device and the end of the loader passed on."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    class SequenceLoader(UlyssesSPDataLoaderAdapter):  # type: ignore[misc]  # DeepSpeed is not typed
        """Gives this process its part of each sequence."""

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
