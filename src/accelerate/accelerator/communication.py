"""Facet of `Accelerator`: tensors and objects of all ranks together."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from accelerate.accelerator.metrics import gather_samples, last_samples, mean_over_ranks
from accelerate.accelerator.runtime import Runtime
from accelerate.ops import ReductionName, gather, pad_across_processes, reduce

T = TypeVar("T")


class Communication:
    """Collectives over nested data; called on all ranks in the same order."""

    _runtime: Runtime

    def gather(self, tensor: T) -> T:
        """Return the tensors of all ranks, joined on dimension 0.

        Args:
            tensor: a tensor, or lists, tuples and dictionaries of tensors, of the same shapes on all ranks;
                0-d tensors count as length 1.

        Returns:
            The same structure on every rank.
        """
        return gather(tensor)

    @overload
    def gather_for_metrics(self, input_data: list[T], use_gather_object: bool = False) -> list[T]: ...
    @overload
    def gather_for_metrics(self, input_data: T, use_gather_object: Literal[False] = False) -> T: ...
    @overload
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool) -> Any: ...
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the samples of all ranks without the duplicates that filled the last batch.

        Call it on what a model gave for a batch of a prepared loader, inside the loop over that loader.

        Args:
            input_data: tensors whose dimension 0 is the batch, in any nesting, or a list with one object per
                sample. What is not one per sample comes whole from each rank, see `weighted_mean`.
            use_gather_object: gather as objects although there are tensors in it.

        Returns:
            The same structure on every rank; over a whole loader exactly its dataset, in order when not
            shuffled. On one process what was given; but with a short last batch, what is as long as a full
            one (a loss repeated for each sample) is cut to the samples that there are.
        """
        if not self._runtime.state.use_distributed:
            return last_samples(input_data, self._runtime.gradient_state.active_dataloader)
        return gather_samples(input_data, self._runtime.gradient_state.active_dataloader, use_gather_object)

    def weighted_mean(self, value: T, weight: Any) -> T:
        """Return the mean over all ranks of values that are means themselves, or whatever has a weight.

        `weighted_mean(loss, len(labels))` is the loss over all samples, however unevenly ranks have them. For
        a whole epoch add up `loss * len(labels)` and `len(labels)` in the loop, and call this once after it
        with the quotient and the second sum. A batch that is filled up holds samples twice, and so does its
        mean: evaluate with `even_batches=False`, or gather values per sample.

        Args:
            value: a tensor, or any nesting of tensors, of the same shapes on all ranks.
            weight: how much the value of this rank counts: the number of samples in it, as a number or a 0-d
                tensor; or a tensor that can be expanded to the shape of each value.

        Returns:
            The same structure on every rank: the sum of `value * weight` over the sum of `weight`, formed in
            float64 where the device has it, in the dtype of the value (integers: the default dtype). Where
            all weights are 0 it is NaN. On one process what was given. Nothing is differentiable.

        Raises:
            ConfigurationError: a weight that is no number and no tensor, or does not fit.
        """
        return mean_over_ranks(value, weight)

    def reduce(self, tensor: T, reduction: ReductionName = "sum", scale: float = 1.0) -> T:
        """Return tensors combined over all ranks, element by element.

        Args:
            tensor: a tensor, or any nesting of tensors, of the same shapes on all ranks.
            reduction: "sum", "mean", "max", "min" or "none".
            scale: factor on the result.
        """
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Return tensors padded to the largest size that any rank has, so that they can be gathered.

        Args:
            tensor: a tensor, or any nesting of tensors.
            dim: dimension that differs between ranks.
            pad_index: value of the padding.
            pad_first: whether the padding comes before the data.
        """
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
