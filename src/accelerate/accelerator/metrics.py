"""Metrics over all ranks, with each sample of an evaluation counted once.

`Accelerator.gather_for_metrics` and `weighted_mean` delegate to these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch

from accelerate import devices, ops
from accelerate.accelerator import batch_owner
from accelerate.base import StateError, wrong_value
from accelerate.logging import get_logger
from accelerate.nested import contains_tensor, recursively_apply
from accelerate.state import GradientState
from accelerate.strategies import axes

logger = get_logger(__name__)


T = TypeVar("T")

_Counts = tuple[int, ...]


def gather_for_metrics(gradients: GradientState, data: Any, use_gather_object: bool) -> Any:
    """Returns the samples of all ranks without padding, see `Accelerator.gather_for_metrics`."""
    loader = batch_owner.find_loader(gradients, data)
    if ops.current_transport().size == 1:
        return _last_samples(data, loader, use_gather_object)
    if loader is not None and loader.replicates_batches:
        data = axes.merge_sequences(axes.merge_shards(data, loader.read_at), loader.read_at)
    return _gather_samples(data, loader, use_gather_object)


def weighted_mean(value: T, weight: Any) -> T:
    """Returns the weighted mean of values over all ranks, see `Accelerator.weighted_mean`."""
    if not isinstance(weight, (Real, torch.Tensor)):
        reason = "it is the weight of the value of this rank"
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


def _gather_samples(data: Any, loader: Any, as_objects: bool) -> Any:
    """Gathers the samples of the current batch of a loader, without padding."""
    counts = None if loader is None else _counts_of(loader)
    if as_objects:
        is_rows = isinstance(data, torch.Tensor) and data.ndim
        return _gather_objects(list(data) if is_rows else data, counts, loader)
    leaves, has_others = _leaves_of(data), not _is_of_tensors(data)
    if leaves is None or (has_others and isinstance(data, list)):
        return _gather_objects(data, counts, loader)
    if loader is not None and any(isinstance(leaf, list) for leaf in leaves):
        valid = _agree([_valid_rows(_num_rows(leaf), counts, loader) for leaf in leaves])
        if all(valid[i] for i, leaf in enumerate(leaves) if isinstance(leaf, list)):
            order = iter(valid)
            return recursively_apply(lambda leaf: _gather_leaf(leaf, next(order)), data, test_type=_is_leaf)
    if has_others:
        return _gather_objects(data, counts, loader)
    return ops.gather(data) if counts is None else _gather_tensors(ops.to_full_tensors(data), counts, loader)


def _last_samples(data: Any, loader: Any, as_objects: bool) -> Any:
    """Returns the samples of a short batch, of values with as many rows as a full batch, on one process.

    Clients repeat the loss for each sample of a full batch, to weight batches by their number of samples.
    """
    if loader is None or loader.full_rows is None:
        return data
    full, real = loader.full_rows, batch_owner.num_real_rows(loader)
    if real >= full:
        return data

    def cut(leaf: torch.Tensor) -> Any:
        length = _num_rows(leaf)
        # The rows of the batch are samples, even if the length of the data is wrong.
        is_repeated = length == full and (loader.valid_counts is not None or length != loader.batch_rows)
        return leaf[:real] if is_repeated else leaf

    leaves = None if as_objects else _leaves_of(data)
    lists = [leaf for leaf in leaves or () if isinstance(leaf, list)]
    if lists and all(len(leaf) in (full, loader.batch_rows) for leaf in lists):
        return recursively_apply(cut, data, test_type=_is_leaf)
    if as_objects or not _is_of_tensors(data):
        items = data if isinstance(data, (list, tuple)) else ()
        values = [item for item in items if isinstance(item, (list, torch.Tensor))]
        are_per_sample = loader.batch_rows in map(_num_rows, values)
        return cut(data) if items and not are_per_sample else data
    is_object_list = isinstance(data, list) and len(data) == loader.batch_rows
    return data if is_object_list else recursively_apply(cut, data)


# The structure of the data


def _leaves_of(data: object) -> list[Any] | None:
    """Returns the tensors and the lists of objects in a structure, or None if there is another value.

    Tuples, dictionaries, and lists that contain a tensor themselves belong to the structure.
    """
    if _is_leaf(data):
        return [data]
    if not isinstance(data, (list, tuple, Mapping)):
        return None
    leaves: list[Any] = []
    for item in data.values() if isinstance(data, Mapping) else data:
        inner = _leaves_of(item)
        if inner is None:
            return None
        leaves += inner
    return leaves


def _is_leaf(item: object) -> bool:
    if isinstance(item, list):
        return not any(isinstance(each, torch.Tensor) for each in item)
    return isinstance(item, torch.Tensor)


def _is_of_tensors(data: object) -> bool:
    """Returns whether a structure has tensors and no other values."""
    return contains_tensor(data) and not _has_others(data)


def _has_others(data: object) -> bool:
    if isinstance(data, (list, tuple, Mapping)):
        return any(map(_has_others, data.values() if isinstance(data, Mapping) else data))
    return not isinstance(data, torch.Tensor)


# Gathering


def _counts_of(loader: Any) -> _Counts | None:
    """Returns the number of samples of each rank in the current batch, or None if all have a full batch.

    Of ranks with the same batch only the first has samples.
    """
    counts: _Counts | None = loader.valid_counts
    if counts is not None and len(counts) == 1 and not loader.replicates_batches:
        counts = None  # each rank reads all samples
    if counts is not None:
        _refuse_absent_ranks(loader, counts)
    if not (loader.shards_whole_batches or loader.replicates_batches):
        return counts
    rows = loader.batch_rows if counts is None else counts[loader.plan.group]
    gathered = ops.gather_object([(rows, loader.full_rows)])
    sizes = [size for size, _ in gathered]
    if None in sizes:
        return None
    group_of = loader.groups_of_ranks()
    sizes = [0 if group in group_of[:rank] else sizes[rank] for rank, group in enumerate(group_of)]
    is_full = counts is None and all(size == full for size, full in gathered)
    return None if is_full and len(set(sizes)) == 1 else tuple(sizes)


def _gather_tensors(data: Any, counts: _Counts, loader: Any) -> Any:
    """Gathers tensors with rows for each sample without padding, and other tensors whole."""
    leaves: list[torch.Tensor] = []
    recursively_apply(leaves.append, data, error_on_other_type=True)
    agreed = _agree([_rows_per_sample(_num_rows(leaf), counts, loader) for leaf in leaves])
    # A number that ranks do not agree on is right by chance.
    rows = [number or Fraction(0) for number in agreed]
    if not all(rows):
        _warn_not_per_sample(counts, loader.batch_rows)
    gathered: dict[Fraction, Iterator[Any]] = {}
    for number in sorted(set(rows)):
        chosen = [leaf for leaf, its_number in zip(leaves, rows, strict=True) if its_number == number]
        valid = [int(count * number) for count in counts]
        gathered[number] = iter(ops.gather_valid(chosen, valid) if number else ops.gather(chosen))
    order = iter(rows)
    return recursively_apply(lambda leaf: next(gathered[next(order)]), data)


def _gather_objects(data: Any, counts: _Counts | None, loader: Any) -> Any:
    """Gathers a list with objects for each sample without padding, and other objects whole."""
    if counts is None:
        return ops.gather_object(data)
    length = len(data) if isinstance(data, (list, tuple)) else None
    (number,) = _agree([_rows_per_sample(length, counts, loader)])
    if number:
        return ops.gather_valid_objects(data, [int(count * number) for count in counts])
    _warn_not_per_sample(counts, loader.batch_rows)
    return ops.gather_object(data)


def _gather_leaf(leaf: Any, valid: list[int] | None) -> Any:
    """Gathers the valid rows of a tensor, all of it if they are not known, or the valid items of a list."""
    if valid is None:
        return ops.gather(leaf)
    if isinstance(leaf, list):
        return ops.gather_valid_objects(leaf, valid)
    return ops.gather_valid(ops.to_full_tensors(leaf), valid)


def _valid_rows(length: int | None, counts: _Counts | None, loader: Any) -> list[int] | None:
    """Returns the number of valid rows of each rank in a value per sample, and None for other values."""
    if counts is None:
        is_own = length and length == loader.batch_rows
        return [length or 0] * ops.current_transport().size if is_own else None
    number = _rows_per_sample(length, counts, loader)
    return [int(count * number) for count in counts] if number else None


def _agree(values: list[T | None]) -> list[T | None]:
    """Returns the values that are equal on all ranks, and None for others."""
    gathered = ops.gather_object([values])
    if len({len(each) for each in gathered}) > 1:
        return [None] * len(values)
    columns = zip(*gathered, strict=True)
    return [column[0] if all(value == column[0] for value in column) else None for column in columns]


def _rows_per_sample(length: int | None, counts: _Counts, loader: Any) -> Fraction:
    """Returns the number of rows of a value for each row of the batch, or 0 if it is not known.

    A value may also be repeated for each sample of a full batch, or of the split batch of all ranks. A
    collate function may pack several samples into a row.
    """
    if length is None:
        return Fraction(0)
    count, full, number = counts[ops.current_transport().rank], loader.full_rows or 0, loader.rows_per_sample
    is_own = loader.batch_rows in (None, length)
    if number > 1:
        is_own = is_own and length in (number * count, number * full)
    if not (number and is_own):
        number = {full * loader.plan.groups * loader.plan.split: loader.plan.groups, full: 1}.get(length, 0)
        if number == 1 and loader.valid_counts is None and loader.replicates_batches and loader.batch_rows:
            number = Fraction(batch_owner.num_real_rows(loader), loader.batch_rows)
    return Fraction(number if length >= count * number else 0)


def _num_rows(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape[0] if leaf.ndim else None
    return len(leaf)


def _warn_not_per_sample(counts: _Counts, rows: int | None) -> None:
    if set(counts) == {rows}:  # there is no padding, and a mean over processes is right
        return
    if torch.is_grad_enabled():  # the loss of a training loop needs no exact mean
        return
    file = Path(ops.calling_frame(sys._getframe()).f_code.co_filename)
    if {"site-packages", "dist-packages"} & set(file.parts):
        return  # the user cannot change a call in an installed library
    logger.warning_once(
        "gather_for_metrics got a value that is not one per sample: it is gathered as it is, from each "
        "process, and the mean of the result gives processes with fewer samples too much weight. Gather "
        "values per sample, or use accelerator.weighted_mean(value, weight) with the number of samples as "
        "the weight."
    )


def _refuse_absent_ranks(loader: Any, counts: _Counts) -> None:
    """Raises an error if a rank has no batch, because it does not call this and the others would hang."""
    absent = [rank for rank, count in enumerate(counts) if count == 0]
    if not absent:
        return
    sources = (getattr(loader, "plan", None), loader.batch_sampler, loader.dataset)
    evens = (getattr(source, "even_batches", getattr(source, "even", None)) for source in sources)
    if not all(even is None or even for even in evens):
        raise StateError(
            f"gather_for_metrics: ranks {absent} have no batch in this last step, because even_batches "
            "is False, so they cannot take part. Prepare the evaluation loader with even_batches=True: its "
            "padding is not gathered."
        )


def _check_expands(weight: torch.Tensor, leaf: torch.Tensor) -> None:
    sizes = zip(reversed(weight.shape), reversed(leaf.shape), strict=False)
    if weight.ndim > leaf.ndim or any(size not in (1, wanted) for size, wanted in sizes):
        reason = f"this shape does not fit a value of shape {list(leaf.shape)}"
        fix = "Give one number, or a tensor that can be expanded to the shape of the value"
        raise wrong_value("weight", list(weight.shape), reason, fix)


def _exact_dtype(leaf: torch.Tensor) -> torch.dtype:
    """Returns float64, or float32 on devices without it."""
    if leaf.dtype.is_complex:
        return torch.complex128
    return torch.float64 if devices.of_device(leaf.device).has_float64 else torch.float32


def _divide(total: torch.Tensor, weight: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    is_exact = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return (total / weight).to(leaf.dtype if is_exact else torch.get_default_dtype())
