"""Facet of `Accelerator`: tensors, objects and decisions of all ranks together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch

from accelerate import devices, ops
from accelerate.accelerator.runtime import Runtime
from accelerate.base import StateError, wrong_value
from accelerate.logging import get_logger
from accelerate.nested import contains_tensor, recursively_apply

logger = get_logger(__name__)


T = TypeVar("T")

_Counts = tuple[int, ...]


class Communication:
    """Collectives over nested data; called on all ranks in the same order."""

    _runtime: Runtime

    def gather(self, tensor: T, *, uneven: bool = False) -> T:
        """Return the tensors of all ranks, joined on dimension 0.

        Args:
            tensor: a tensor, or lists, tuples and dictionaries of tensors, of the same shapes on all ranks;
                0-d tensors count as length 1.
            uneven: whether dimension 0 may differ between ranks; nothing is padded.

        Returns:
            The same structure on every rank, in rank order.
        """
        return ops.gather(tensor, uneven=uneven)

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
            shuffled. A value that has as many rows as a full batch, such as a loss repeated for each sample,
            is cut to the samples of a shorter batch. On one process, everything else is returned as it is.
        """
        loader = self._runtime.gradient_state.active_dataloader
        if not self._runtime.state.use_distributed:
            return _last_samples(input_data, loader)
        return _gather_samples(input_data, loader, use_gather_object)

    def weighted_mean(self, value: T, weight: Any) -> T:
        """Return the mean over all ranks of values that are means themselves, or whatever has a weight.

        `weighted_mean(loss, len(labels))` is the loss over all samples, also where ranks have different
        numbers of them. For a whole epoch add up `loss * len(labels)` and `len(labels)` in the loop, and call
        this once after it with the quotient and the second sum. A batch that is filled up holds samples
        twice, and so does its mean: evaluate with `even_batches=False`, or gather values per sample.

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
        if not isinstance(weight, (Real, torch.Tensor)):
            reason = "it says how much the value of this process counts"
            fix = "Give the number of samples that the value is a mean of: a number, or a tensor"
            raise wrong_value("weight", weight, reason, fix)
        weighted: list[torch.Tensor] = []

        def append(leaf: torch.Tensor) -> None:
            exact = leaf.detach().to(_exact_dtype(leaf))
            weights = torch.as_tensor(weight, device=leaf.device).detach().to(exact.dtype)
            _check_expands(weights, leaf)
            weighted.extend((exact * weights, weights))

        recursively_apply(append, value, error_on_other_type=True)
        sums: Iterator[torch.Tensor] = iter(ops.reduce(weighted, "sum"))
        means: T = recursively_apply(lambda leaf: _divide(next(sums), next(sums), leaf), value)
        return means

    def reduce(self, tensor: T, reduction: ops.ReductionName = "sum", scale: float = 1.0) -> T:
        """Return tensors combined over all ranks, element by element.

        Args:
            tensor: a tensor, or any nesting of tensors, of the same shapes on all ranks.
            reduction: "sum", "mean", "max", "min" or "none".
            scale: factor on the result.
        """
        return ops.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Return tensors padded to the largest size that any rank has, so that they can be gathered.

        Args:
            tensor: a tensor, or any nesting of tensors.
            dim: dimension that differs between ranks.
            pad_index: value of the padding.
            pad_first: whether the padding comes before the data.
        """
        return ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # Decisions, asked for once in each step

    @property
    def should_save(self) -> bool:
        """Whether to save a checkpoint now; true once for each request, at the same step on all ranks.

        Asked for by SIGTERM, SIGUSR1, SIGUSR2, the end of `max_time` or of a SLURM allocation, `stop_file`,
        `save_file`, and a preemption that Ray Train announces. Ask before `should_stop`.
        """
        return self._runtime.agreement.read_save()

    @property
    def should_stop(self) -> bool:
        """Whether to leave the training loop; from the same step on all ranks, and for good.

        Asked for by SIGTERM, SIGUSR1, the end of `max_time` or of a SLURM allocation, and `stop_file`. The
        first question of a run sets the handlers of these signals; a second SIGTERM ends the process.
        """
        return self._runtime.agreement.read_stop()


def _gather_samples(data: Any, loader: Any, as_objects: bool) -> Any:
    """Gather the samples of a batch of the loader being read, without those that only fill the batch up."""
    as_objects = as_objects or not contains_tensor(data)
    counts = None if loader is None else _counts_of(loader)
    if counts is None:
        return ops.gather_object(data) if as_objects else ops.gather(data)
    if as_objects:
        return _gather_objects(data, counts, loader)
    return _gather_tensors(ops.to_full_tensors(data), counts, loader)


def _last_samples(data: Any, loader: Any) -> Any:
    """Cut on one process what is as long as a full batch, where the batch is shorter.

    Loops of clients repeat the loss for each sample of a full batch, to weight batches by their samples.
    """
    if loader is None or loader.full_rows is None:
        return data
    full, counts = loader.full_rows, loader.valid_counts
    if counts is not None:
        real = sum(counts)
    else:  # the batch may have other rows than samples
        real = loader.remainder if loader.end_of_dataloader and loader.remainder > 0 else full
    if real >= full:
        return data

    def is_repeated(length: int | None) -> bool:
        # A value with the rows of the batch has those of samples, also where the length of the data is wrong.
        return length == full and (counts is not None or length != loader.batch_rows)

    if isinstance(data, (list, tuple)) and not contains_tensor(data):
        return data[:real] if is_repeated(len(data)) else data
    return recursively_apply(lambda leaf: leaf[:real] if is_repeated(_num_rows(leaf)) else leaf, data)


def _counts_of(loader: Any) -> _Counts | None:
    """Samples of the batch just given that count on each rank; None where all ranks have a full batch.

    Of ranks that share a batch, the first one's count.
    """
    counts: _Counts | None = loader.valid_counts
    if counts is not None and len(counts) == 1 and not loader.replicates_batches:
        counts = None  # each rank reads all samples
    if counts is not None:
        _refuse_absent_ranks(loader, counts)
    if not (loader.shards_whole_batches or loader.replicates_batches):
        return counts
    rows = loader.batch_rows if counts is None else counts[loader.plan.group]
    found = ops.gather_object([(rows, loader.full_rows)])
    sizes = [size for size, _ in found]
    if None in sizes:
        return None
    group_of = loader.groups_of_ranks()
    sizes = [0 if group in group_of[:rank] else sizes[rank] for rank, group in enumerate(group_of)]
    is_full = counts is None and all(size == full for size, full in found)
    return None if is_full and len(set(sizes)) == 1 else tuple(sizes)


def _gather_tensors(data: Any, counts: _Counts, loader: Any) -> Any:
    """Gather tensors with rows for each sample without padding, and others whole."""
    leaves: list[torch.Tensor] = []
    recursively_apply(leaves.append, data, error_on_other_type=True)
    rows = _same_on_all([_rows_per_sample(_num_rows(leaf), counts, loader) for leaf in leaves])
    if not all(rows):
        _warn_not_per_sample(counts, loader.batch_rows)
    gathered: dict[int, Iterator[Any]] = {}
    for number in sorted(set(rows)):
        chosen = [leaf for leaf, its_number in zip(leaves, rows, strict=True) if its_number == number]
        valid = [count * number for count in counts]
        gathered[number] = iter(ops.gather_valid(chosen, valid) if number else ops.gather(chosen))
    order = iter(rows)
    return recursively_apply(lambda leaf: next(gathered[next(order)]), data)


def _gather_objects(data: Any, counts: _Counts, loader: Any) -> Any:
    """Gather a list with objects for each sample without padding, and anything else whole."""
    length = len(data) if isinstance(data, (list, tuple)) else None
    (number,) = _same_on_all([_rows_per_sample(length, counts, loader)])
    if number:
        return ops.gather_valid_objects(data, [count * number for count in counts])
    _warn_not_per_sample(counts, loader.batch_rows)
    return ops.gather_object(data)


def _same_on_all(numbers: list[int]) -> list[int]:
    """Return the numbers that all ranks have, and 0 for others: a length can be right by chance on one."""
    columns = zip(*ops.gather_object([numbers]), strict=True)
    return [column[0] if len(set(column)) == 1 else 0 for column in columns]


def _rows_per_sample(length: int | None, counts: _Counts, loader: Any) -> int:
    """Return the rows that a value has for each sample of the batch, 0 where that is not known.

    A value may also be repeated for each sample of a full batch, or of the batch of all ranks that is split.
    """
    if length is None:
        return 0
    count, full, number = counts[ops.current_transport().rank], loader.full_rows or 0, loader.rows_per_sample
    is_own = loader.batch_rows in (None, length)
    if number > 1:
        is_own = is_own and length in (number * count, number * full)
    if not (number and is_own):
        number = {full * loader.plan.groups * loader.plan.split: loader.plan.groups, full: 1}.get(length, 0)
    return number if length >= count * number else 0


def _num_rows(leaf: torch.Tensor) -> int | None:
    return leaf.shape[0] if leaf.ndim else None


def _warn_not_per_sample(counts: _Counts, rows: int | None) -> None:
    if set(counts) == {rows}:  # nothing is to be cut, and a mean over processes is right
        return
    if torch.is_grad_enabled():  # training watches its loss; only an evaluation is about each sample once
        return
    file = Path(ops.calling_frame(sys._getframe()).f_code.co_filename)
    if {"site-packages", "dist-packages"} & set(file.parts):
        return  # an installed library asks: its user cannot change the call
    logger.warning_once(
        "gather_for_metrics got a value that is not one per sample: it is gathered as it is, from each "
        "process, and a mean over what comes out weighs processes with fewer samples too much. Gather values "
        "per sample, or take accelerator.weighted_mean(value, weight) with the number of samples as the "
        "weight."
    )


def _refuse_absent_ranks(loader: Any, counts: _Counts) -> None:
    """Raise where a rank has no batch in this round: it will not come, and the others would hang."""
    absent = [rank for rank, count in enumerate(counts) if count == 0]
    if not absent:
        return
    sources = (getattr(loader, "plan", None), loader.batch_sampler, loader.dataset)
    evens = (getattr(source, "even_batches", getattr(source, "even", None)) for source in sources)
    if not all(even is None or even for even in evens):
        raise StateError(
            f"gather_for_metrics: processes {absent} have no batch in this last round, because even_batches "
            "is False, so they cannot take part. Prepare the evaluation loader with even_batches=True: what "
            "fills it up is left out of what is gathered."
        )


def _check_expands(weight: torch.Tensor, leaf: torch.Tensor) -> None:
    sizes = zip(reversed(weight.shape), reversed(leaf.shape), strict=False)
    if weight.ndim > leaf.ndim or any(size not in (1, wanted) for size, wanted in sizes):
        reason = f"this shape does not fit a value of shape {list(leaf.shape)}"
        fix = "Give one number, or a tensor that can be expanded to the shape of the value"
        raise wrong_value("weight", list(weight.shape), reason, fix)


def _exact_dtype(leaf: torch.Tensor) -> torch.dtype:
    """Doubles, but on devices that have none."""
    if leaf.dtype.is_complex:
        return torch.complex128
    return torch.float64 if devices.of_device(leaf.device).has_float64 else torch.float32


def _divide(total: torch.Tensor, weight: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    is_exact = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return (total / weight).to(leaf.dtype if is_exact else torch.get_default_dtype())
