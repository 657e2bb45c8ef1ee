"""The interface of an axis of the mesh whose ranks work on the same batch; the base class is one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn


class Axis:
    """One rank, which has whole layers and whole sequences: the null case of every axis.

    All ranks call the same methods in the same order: `transform` for each model before it is wrapped,
    `transform_loader` for each loader after its model, `batch` around forward and backward.

    Attributes:
        size: number of ranks along the axis.
        splits_buffers: whether `batch` splits tensors of the training loop.
        groups: process groups of the axis as an engine takes them; `None` where torch's mesh has them.
    """

    size: int = 1
    splits_buffers: bool = False
    groups: Any = None

    def transform(self, models: Iterable[nn.Module], micro_batch_size: int = 1) -> None:
        """Let models share their work along the axis, in place.

        Args:
            models: not wrapped yet; those that are transformed already are left as they are.
            micro_batch_size: samples of one batch on one rank.
        """

    def transform_loader(self, loader: Any, model: Any) -> Any:
        """Return a loader that gives this rank its part of each batch; the very one without an axis."""
        return loader

    def batch(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context in which this rank holds its part of the sequences of a batch.

        Forward and backward both belong inside it.

        Args:
            buffers: tensors with a sequence dimension, equal on all ranks of the axis; split in place.
            no_restore_buffers: those that need not be whole again afterwards.

        Raises:
            ConfigurationError: dimensions and buffers do not go together, or a sequence cannot be split.
        """
        return nullcontext()
