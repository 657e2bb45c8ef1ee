"""Facet of `Accelerator`: tensors and objects of all ranks together."""

from __future__ import annotations

from typing import Any, Literal

import torch

from accelerate.accelerator.runtime import Runtime
from accelerate.base.errors import StateError
from accelerate.logging import get_logger
from accelerate.nested import contains_tensor, recursively_apply
from accelerate.ops.collectives import gather, gather_object, gather_valid, gather_valid_objects, reduce
from accelerate.ops.padding import pad_across_processes

logger = get_logger(__name__)


class Communication:
    """Collectives over nested data; called on all ranks in the same order."""

    _runtime: Runtime

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks, joined on dimension 0.

        Args:
            tensor: a tensor, or lists, tuples and dictionaries of tensors, of the same shapes on all ranks;
                0-d tensors count as length 1.

        Returns:
            The same structure on every rank.
        """
        return gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the samples of all ranks without the duplicates that filled the last batch.

        Call it on what a model gave for a batch of a prepared loader, inside the loop over that loader.

        Args:
            input_data: tensors whose dimension 0 is the batch, in any nesting, or a list with one object per
                sample.
            use_gather_object: gather as objects although there are tensors in it.

        Returns:
            The same structure on every rank; over a whole loader exactly its dataset, in order when not
            shuffled.
        """
        if not self._runtime.state.use_distributed:
            return input_data
        as_objects = use_gather_object or not contains_tensor(input_data)
        loader = self._runtime.gradient_state.active_dataloader
        counts = None if loader is None else loader.valid_counts
        if counts is None:
            return gather_object(input_data) if as_objects else gather(input_data)
        _refuse_absent_ranks(loader, counts)
        if as_objects:
            return gather_valid_objects(input_data, counts)
        return recursively_apply(
            _gather_samples, input_data, counts, loader.batch_rows, error_on_other_type=True
        )

    def reduce(
        self, tensor: Any, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0
    ) -> Any:
        """Return tensors summed or averaged over all ranks, element by element.

        Args:
            tensor: a tensor, or any nesting of tensors, of the same shapes on all ranks.
            reduction: "sum", "mean" or "none".
            scale: factor on the result.
        """
        return reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return tensors padded to the largest size that any rank has, so that they can be gathered.

        Args:
            tensor: a tensor, or any nesting of tensors.
            dim: dimension that differs between ranks.
            pad_index: value of the padding.
            pad_first: whether the padding comes before the data.
        """
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)


def _refuse_absent_ranks(loader: Any, counts: tuple[int, ...]) -> None:
    """Raise where a rank has no batch in this round: it will not come, and the others would hang."""
    absent = [rank for rank, count in enumerate(counts) if count == 0]
    if absent and not getattr(loader.batch_sampler, "even_batches", True):
        raise StateError(
            f"gather_for_metrics: processes {absent} have no batch in this last round, because even_batches "
            "is False, so they cannot take part. Prepare the evaluation loader with even_batches=True: what "
            "fills it up is left out of what is gathered."
        )


def _gather_samples(tensor: torch.Tensor, counts: tuple[int, ...], rows: int | None) -> Any:
    """Gather a tensor with one row per sample without filler; any other is gathered whole."""
    if tensor.ndim == 0 or (rows is not None and tensor.shape[0] != rows):
        logger.warning_once(
            "gather_for_metrics got a value that is not one per sample: it is gathered as it is, from each "
            "process, and its mean weighs processes with fewer samples too much. Gather values per sample, "
            "and average then."
        )
        return gather(tensor)
    return gather_valid(tensor, counts)
