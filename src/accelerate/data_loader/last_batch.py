"""Padding of the last batch with samples from the beginning of the epoch, and counts of the real samples.

Every process draws the order of the whole epoch, so every process computes the counts of all processes
without communication. The samplers pad indices, the loaders pad batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import Any, TypeVar

import torch

from accelerate import torch_private
from accelerate.base import PreparationError
from accelerate.nested import concatenate, honor_mapping, honor_type, ignorant_find_batch_size, slice_tensors

T = TypeVar("T")

Counts = tuple[int, ...]
"""Number of real samples on each data-parallel rank."""
_Path = tuple[Any, ...]  # keys and positions that lead to a value in a batch
PaddingRecord = dict[int, Counts]
"""Counts by the number of the batch in its pass, of batches with padding or with different sizes."""


@dataclass
class PaddingSource:
    """First items of an epoch, which pad its end."""

    items: list[Any] = field(default_factory=list)  # of the pass that began last
    restored: list[Any] = field(default_factory=list)  # of the epoch that the next pass resumes

    def take_restored(self) -> list[Any]:
        """Returns the restored items, and forgets them, because they are valid for one pass."""
        restored, self.restored = self.restored, []
        return restored


def pad(items: Iterable[T], first: Iterable[T], size: int) -> list[T]:
    """Returns `size` items, padded with items from the beginning of the epoch, repeated if needed."""
    return list(islice(chain(items, cycle(first)), size))


def first_samples(first: Sequence[Any], count: int) -> Iterator[Any]:
    """Yields batches of `count` samples in all from the first batches of the epoch, repeated if needed."""
    beginning = join(first)
    samples = count_samples(beginning) or 1
    while count > 0:
        yield cut_batch(beginning, slice(0, min(count, samples)), samples)
        count -= samples


def join(batches: Sequence[Any]) -> Any:
    """Returns one batch with the samples of all batches, or the only one unchanged.

    Leaves that do not have one row for each sample are those of the first batch.

    Raises:
        PreparationError: The batches cannot be joined, see `can_join`.
    """
    if len(batches) == 1:
        return batches[0]
    if not can_join(batches):
        raise PreparationError(
            f"Batches of type {type(batches[0]).__name__} cannot be joined for the end of the epoch: tensors "
            "have samples of different shapes, or have no row for each sample and differ. Pad samples to one "
            "shape, or set drop_last=True, or dispatch_batches=False."
        )
    return _join(batches, count_samples(batches[0]), _paths_of_entries(batches))


def _join(items: Sequence[Any], samples: int | None, entries: set[_Path], path: _Path = ()) -> Any:
    first = items[0]
    if path in entries:
        return type(first)(chain.from_iterable(items))
    if isinstance(first, torch.Tensor):
        return concatenate(items) if _has_rows(first, samples) else first
    if isinstance(first, Mapping):
        columns = {key: [item[key] for item in items] for key in first}
        joined = {key: _join(parts, samples, entries, (*path, key)) for key, parts in columns.items()}
        return honor_mapping(first, joined)
    if isinstance(first, (list, tuple)):
        if any(map(_is_nested, first)):
            parts = enumerate(zip(*items, strict=True))
            return honor_type(first, (_join(part, samples, entries, (*path, i)) for i, part in parts))
        return concatenate(items) if len(first) == samples else first
    return first


def can_join(batches: Sequence[Any]) -> bool:
    """Returns whether samples of batches have equal shapes, and their other leaves are equal."""
    entries = _paths_of_entries(batches)
    first, *others = [_split_leaves(batch, entries) for batch in batches]
    return all(shapes == first[0] and _are_equal(rest, first[1]) for shapes, rest in others)


def has_entries(batches: Sequence[Any]) -> bool:
    """Returns whether a batch has a list with one structure for each sample."""
    return bool(_paths_of_entries(batches))


def can_cut(batches: Sequence[Any]) -> bool:
    """Returns whether leaves of batches that `cut_batch` does not cut are equal in all batches."""
    entries = _paths_of_entries(batches)
    first, *others = [_split_leaves(batch, entries) for batch in batches]
    return all(_are_equal(rest, first[1]) for _, rest in others)


def _split_leaves(batch: object, entries: set[_Path]) -> tuple[list[Any], list[Any]]:
    """Returns the shapes of samples in leaves with one row for each sample, and all other leaves."""
    samples, shapes, rest = count_samples(batch), list[Any](), list[Any]()
    for path, item in _walk(batch, entries):
        if isinstance(item, torch.Tensor):
            if _has_rows(item, samples):
                shapes.append(None if item.is_nested else item.shape[1:])
            else:
                rest.append(item)
        elif isinstance(item, Mapping):
            rest.append(list(item))
        elif not isinstance(item, (list, tuple)) or len(item) != samples:
            rest.append(item)
        elif path in entries:
            shapes.append(type(item))
    return shapes, rest


def _paths_of_entries(batches: Sequence[Any]) -> set[_Path]:
    """Returns where batches have lists with one structure for each sample.

    In a batch of few samples, such a list may also look like a list of columns.
    """
    sizes = [(batch, count_samples(batch)) for batch in batches]
    return {path for batch, size in sizes for path, item in _walk(batch) if path and _has_entries(item, size)}


def _walk(batch: object, entries: set[_Path] | None = None) -> Iterator[tuple[_Path, Any]]:
    """Yields paths and values of mappings, of leaves and, without `entries`, of all lists."""
    waiting: list[tuple[_Path, Any]] = [((), batch)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, Mapping):
            waiting += [((*path, key), value) for key, value in item.items()]
        elif isinstance(item, (list, tuple)) and any(map(_is_nested, item)) and path not in (entries or ()):
            waiting += [((*path, number), value) for number, value in enumerate(item)]
            if entries is not None:
                continue
        yield path, item


def _has_rows(tensor: torch.Tensor, samples: int | None) -> bool:
    return tensor.ndim > 0 and tensor.size(0) == samples


def _are_equal(leaves: list[Any], others: list[Any]) -> bool:
    """Returns whether lists of leaves are equal, where objects of unknown types differ."""
    return len(leaves) == len(others) and all(map(_is_equal, leaves, others))


def _is_equal(leaf: object, other: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        return isinstance(other, torch.Tensor) and leaf.dtype == other.dtype and torch.equal(leaf, other)
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str, bytes, list, tuple))
    return leaf is other or (is_plain and type(leaf) is type(other) and bool(leaf == other))


def samples_per_part(samples: int, part: int, parts: int) -> list[int]:
    """Returns the number of samples in each of `parts` consecutive parts of size `part`."""
    return [min(max(samples - index * part, 0), part) for index in range(parts)]


def full_rows(nominal: int | None, first: int, *, is_only: bool) -> int:
    """Returns the number of rows of a full batch, by which a shorter one is recognized.

    Args:
        nominal: The declared batch size; None without one.
        first: The number of rows of the first batch. If it is not the only batch and has not the declared
            size, the rows of batches are not samples, or sizes vary: then no batch is known to be short, and
            0 is returned.
        is_only: Whether the first batch is the only one.
    """
    if nominal is None or first == nominal:
        return first
    return nominal if is_only else 0


def rows_per_sample(rows: int | None, samples: int | None) -> int:
    """Returns the number of rows for each sample of a batch, 0 if that is not a whole number."""
    if rows is None or not samples:
        return 1
    return 0 if rows % samples else rows // samples


def count_samples(batch: Any) -> int | None:
    """Returns the length of the first tensor of a batch or, without one, of its first plain list."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else None
    if isinstance(batch, (list, tuple)) and not any(map(_is_nested, batch)):
        return len(batch)
    if not _is_nested(batch):
        return None
    counts = map(count_samples, batch.values() if isinstance(batch, Mapping) else batch)
    return next((count for count in counts if count is not None), None)


def cut_batch(batch: Any, span: slice, samples: int) -> Any:
    """Returns a span of samples, cut from all tensors and lists that have one entry for each sample."""
    if isinstance(batch, torch.Tensor):
        return slice_tensors(batch, span) if _has_rows(batch, samples) else batch
    if isinstance(batch, Mapping):
        return honor_mapping(batch, {key: _cut_value(value, span, samples) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if any(map(_is_nested, batch)):
            return honor_type(batch, (_cut_value(item, span, samples) for item in batch))
        return batch[span] if len(batch) == samples else batch
    return batch


def _cut_value(value: Any, span: slice, samples: int) -> Any:
    return value[span] if _has_entries(value, samples) else cut_batch(value, span, samples)


def _has_entries(value: Any, samples: int | None) -> bool:
    """Returns whether a list in a batch has one structure for each sample, such as boxes and scores.

    A list of columns can have the same length: its tensors and lists have one row for each sample, or its
    items differ in their form.
    """
    if type(value) not in (list, tuple) or not value or len(value) != samples:
        return False
    is_uniform = len({_form_of(item) for item in value}) == 1
    return is_uniform and _is_nested(value[0]) and not all(_has_only_rows(item, samples) for item in value)


def _form_of(item: object) -> Any:
    if isinstance(item, torch.Tensor):
        return item.ndim, item.dtype
    return type(item), tuple(item) if isinstance(item, Mapping) else None


def _has_only_rows(item: object, samples: int) -> bool:
    if isinstance(item, torch.Tensor):
        return _has_rows(item, samples)
    if isinstance(item, Mapping):
        return all(_has_only_rows(value, samples) for value in item.values())
    if isinstance(item, (list, tuple)):
        if any(map(_is_nested, item)):
            return all(_has_only_rows(each, samples) for each in item)
        return len(item) == samples
    return False


def _is_nested(item: object) -> bool:
    return isinstance(item, (torch.Tensor, Mapping, list, tuple))


# Counts that are attached to a batch on its way from a dataset to the loader


@dataclass(slots=True)
class SampleWithCounts:
    """Sample with the counts of its batch, between the dataset and the collate function."""

    sample: Any
    counts: Counts


@dataclass(slots=True)
class BatchWithCounts:
    """Collated batch with its counts, between a worker and the loader."""

    batch: Any
    counts: Counts

    def pin_memory(self, device: Any = None) -> BatchWithCounts:
        """Pins the batch inside, in the pin thread of torch."""
        return BatchWithCounts(torch_private.pin_memory(self.batch, device), self.counts)


@dataclass(frozen=True)
class CountingCollate:
    """Collate function that returns the counts of the first sample together with the batch."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        first = samples[0] if type(samples) is list and samples else samples
        if type(first) is not SampleWithCounts:
            return self.collate(samples)
        plain = [first.sample, *samples[1:]] if samples is not first else first.sample
        return BatchWithCounts(self.collate(plain), first.counts)


def detach_counts(batches: Iterator[Any], padding_record: PaddingRecord) -> Iterator[Any]:
    """Yields the batches without their counts, which are written to `padding_record`."""
    for number, batch in enumerate(batches):
        if type(batch) is BatchWithCounts:
            padding_record[number] = batch.counts
            yield batch.batch
        else:
            yield batch


def in_samples(counts: Counts | None, loader: Any, batch: Any) -> Counts | None:
    """Converts the counts of a batch into samples if they count whole batches."""
    if counts is None or not loader.counts_batches:
        return counts
    size = ignorant_find_batch_size(batch) or 1
    return tuple(count * size for count in counts)


# The remainder


def last_remainder(loader: Any) -> int:
    """Returns the number of real samples in the last global batch, 0 if all are real, -1 if unknown."""
    if loader._drop_last:
        return -1
    if loader.valid_counts is not None:
        return sum(loader.valid_counts)
    return -1 if loader.plan.mode == "already_sharded" else _remainder_of_length(loader)


def remainder_ahead(loader: Any) -> int:
    """Returns the remainder if it is known at the start of a pass, and -1 otherwise."""
    plan = getattr(loader, "plan", None)
    if plan is None or loader._drop_last or plan.has_own_shards or plan.mode == "dispatch":
        return -1
    return _remainder_of_length(loader)


def _remainder_of_length(loader: Any) -> int:
    global_size, length = loader.total_batch_size, length_of(loader.get_sampler())
    if length is None:
        dataset = loader.dataset
        length = length_of(dataset.dataset if hasattr(dataset, "part_size") else dataset)
    return -1 if not global_size or length is None else length % global_size


def length_of(sized: Any) -> int | None:
    """Returns the length of an object, or None if it has none."""
    if not hasattr(sized, "__len__"):
        return None
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a wrapper around an object without a length
        return None
