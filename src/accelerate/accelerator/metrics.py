"""Numbers for metrics: the samples of a batch from all ranks, each once, and means that weigh ranks right."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch

from accelerate.base import StateError, wrong_value
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import contains_tensor, recursively_apply
from accelerate.ops import (
    calling_frame,
    gather,
    gather_object,
    gather_valid,
    gather_valid_objects,
    reduce,
    whole_tensors,
)

logger = get_logger(__name__)

T = TypeVar("T")

_Counts = tuple[int, ...]


def gather_samples(data: Any, loader: Any, as_objects: bool) -> Any:
    """Gather what belongs to the samples of a batch, without what only fills the batch up.

    Args:
        data: Nested tensors, or objects; see `Accelerator.gather_for_metrics`.
        loader: The prepared loader that is being read, or None.
        as_objects: Gather as objects although there are tensors in it.

    Raises:
        StateError: A rank has no batch in this round and will not come.
    """
    as_objects = as_objects or not contains_tensor(data)
    counts = None if loader is None else _counts_of(loader)
    if counts is None:
        return gather_object(data) if as_objects else gather(data)
    if as_objects:
        return _gather_objects(data, counts, loader.batch_rows)
    return _gather_tensors(whole_tensors(data), counts, loader.batch_rows)


def last_samples(data: Any, loader: Any) -> Any:
    """Cut on one process what is as long as a full batch, where the last batch is shorter.

    Loops of clients repeat the loss for each sample of a full batch, to weigh batches by their samples.

    Args:
        data: Nested tensors, or a list with one object for each sample.
        loader: The prepared loader that is being read, or None.

    Returns:
        What was given, but with the last batch.
    """
    if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
        return data
    full, real = loader.total_batch_size, loader.remainder
    if isinstance(data, (list, tuple)) and not contains_tensor(data):
        return data[:real] if len(data) == full else data
    return recursively_apply(lambda leaf: leaf[:real] if _has_rows(leaf, full) else leaf, data)


def mean_over_ranks(value: T, weight: Any) -> T:
    """Average over all ranks, each value weighted by its weight.

    Args:
        value: Nested tensors, of the same shapes on all ranks.
        weight: See `Accelerator.weighted_mean`.
    """
    _check_weight(weight)
    weighed: list[torch.Tensor] = []

    def weigh(leaf: torch.Tensor) -> torch.Tensor:
        exact = leaf.detach().to(_exact_dtype(leaf))
        heavy = torch.as_tensor(weight, device=leaf.device).detach().to(exact.dtype)
        _check_fits(leaf, heavy)
        weighed.extend((exact * heavy, heavy))
        return leaf

    recursively_apply(weigh, value, error_on_other_type=True)
    sums: Iterator[torch.Tensor] = iter(reduce(weighed, "sum"))
    means: T = recursively_apply(lambda leaf: _divide(next(sums), next(sums), leaf), value)
    return means


def _counts_of(loader: Any) -> _Counts | None:
    """Samples of the batch just given that count on each rank; None where all do and ranks have equally many.

    Of ranks that share a batch, the first one's count.
    """
    counts: _Counts | None = loader.valid_counts
    if counts is not None:
        _refuse_absent_ranks(loader, counts)
    if not (loader.deals_ready_batches or loader.shares_batches):
        return counts
    rows = loader.batch_rows if counts is None else counts[loader.plan.group]
    sizes = gather_object([rows])
    if None in sizes:
        return None
    group_of = loader.groups_of_ranks()
    sizes = [0 if group in group_of[:rank] else sizes[rank] for rank, group in enumerate(group_of)]
    return None if counts is None and len(set(sizes)) == 1 else tuple(sizes)


def _gather_tensors(data: Any, counts: _Counts, rows: int | None) -> Any:
    """Gather tensors with one row per sample without filler, any others whole: two messages at most."""
    leaves: list[torch.Tensor] = []
    recursively_apply(leaves.append, data, error_on_other_type=True)
    flags = _agreed([_has_rows(leaf, rows) for leaf in leaves], counts)
    if not all(flags):
        _warn_of_other(counts, rows)
    gathered: dict[bool, Iterator[Any]] = {}
    for flag in set(flags):
        chosen = [leaf for leaf, per_sample in zip(leaves, flags, strict=True) if per_sample == flag]
        gathered[flag] = iter(gather_valid(chosen, counts) if flag else gather(chosen))
    order = iter(flags)
    return recursively_apply(lambda leaf: next(gathered[next(order)]), data)


def _gather_objects(data: Any, counts: _Counts, rows: int | None) -> Any:
    """Gather a list with one object per sample without filler, anything else whole."""
    is_list = isinstance(data, (list, tuple))
    (flag,) = _agreed([is_list and (rows is None or len(data) == rows)], counts)
    if flag:
        return gather_valid_objects(data, counts)
    _warn_of_other(counts, rows)
    return gather_object(data)


def _agreed(flags: list[bool], counts: _Counts) -> list[bool]:
    """What is one per sample on every rank: lengths that only happen to fit differ from rank to rank."""
    if len(set(counts)) == 1:
        return flags
    return [all(column) for column in zip(*gather_object([flags]), strict=True)]


def _has_rows(leaf: torch.Tensor, rows: int | None) -> bool:
    return leaf.ndim > 0 and (rows is None or leaf.shape[0] == rows)


def _warn_of_other(counts: _Counts, rows: int | None) -> None:
    if set(counts) == {rows}:  # nothing is to be cut, and a mean over processes is right
        return
    if torch.is_grad_enabled():  # training watches its loss; only an evaluation is about each sample once
        return
    file = Path(calling_frame(sys._getframe()).f_code.co_filename)
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
    if absent and not _is_even(loader):
        raise StateError(
            f"gather_for_metrics: processes {absent} have no batch in this last round, because even_batches "
            "is False, so they cannot take part. Prepare the evaluation loader with even_batches=True: what "
            "fills it up is left out of what is gathered."
        )


def _is_even(loader: Any) -> bool:
    for told in (getattr(loader, "plan", None), loader.batch_sampler, loader.dataset):
        even: bool | None = getattr(told, "even_batches", getattr(told, "even", None))
        if even is not None and not even:
            return False
    return True


def _check_weight(weight: object) -> None:
    if not isinstance(weight, (Real, torch.Tensor)):
        raise wrong_value(
            "weight",
            weight,
            "it says how much the value of this process counts",
            "Give the number of samples that the value is a mean of: a number, or a tensor",
        )


def _check_fits(leaf: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.ndim == 0 or _extends_to(weight.shape, leaf.shape):
        return
    raise wrong_value(
        "weight",
        list(weight.shape),
        f"this shape does not fit a value of shape {list(leaf.shape)}",
        "Give one number, or a tensor that can be expanded to the shape of the value",
    )


def _extends_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def _exact_dtype(leaf: torch.Tensor) -> torch.dtype:
    """Doubles, but on devices that have none."""
    if leaf.dtype.is_complex:
        return torch.complex128
    return torch.float64 if of_device(leaf.device).has_float64 else torch.float32


def _divide(total: torch.Tensor, weight: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    is_exact = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return (total / weight).to(leaf.dtype if is_exact else torch.get_default_dtype())
