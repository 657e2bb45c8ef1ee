"""How the last batch is filled from the beginning of the epoch, and which of its samples are real.

Every process sees the order of the whole epoch, so every process knows the counts of all without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import Any, TypeVar

import torch

from accelerate import torch_private
from accelerate.nested import concatenate, honor_mapping, honor_type, ignorant_find_batch_size

T = TypeVar("T")

Counts = tuple[int, ...]
Fillers = dict[int, Counts]
"""Number of the batch in its pass -> real samples on each data-parallel rank; only batches with filler."""


@dataclass
class FirstRound:
    """The first items of an epoch, which fill its end."""

    items: list[Any] = field(default_factory=list)  # of the pass begun last
    restored: list[Any] = field(default_factory=list)  # of the epoch that the next pass resumes

    def take_restored(self) -> list[Any]:
        """Return `restored`, which counts for one pass only."""
        restored, self.restored = self.restored, []
        return restored


def fill(items: Iterable[T], first: Iterable[T], size: int) -> list[T]:
    """Return `size` items: those given, then items from the beginning of the epoch, repeated where needed."""
    return list(islice(chain(items, cycle(first)), size))


def first_samples(first: Sequence[Any], count: int) -> Iterator[Any]:
    """Yield batches of `count` samples in all from the first batches of the epoch, repeated where needed."""
    beginning = join(first)
    samples = count_samples(beginning) or 1
    while count > 0:
        yield cut_batch(beginning, slice(0, min(count, samples)), samples)
        count -= samples


def join(batches: Sequence[Any]) -> Any:
    """Return one batch with the samples of all; a single one is returned as it is."""
    return batches[0] if len(batches) == 1 else concatenate(batches)


def real_per_part(samples: int, part: int, parts: int) -> list[int]:
    """Return how many of `samples` fall in each of `parts` consecutive parts of size `part`."""
    return [min(max(samples - index * part, 0), part) for index in range(parts)]


def full_rows(nominal: int | None, first: int, *, is_only: bool) -> int:
    """Return the samples of a full batch, by which a shorter one is recognized.

    Args:
        nominal: The declared batch size; None without one.
        first: The samples in the first batch. Where it is not the only one and has not the declared size, the
            rows of batches are not samples, or sizes vary: then no batch is known to be short, and 0 is
            returned.
        is_only: Whether the first batch is the only one.
    """
    if nominal is None or first == nominal:
        return first
    return nominal if is_only else 0


def rows_per_sample(rows: int | None, samples: int | None) -> int:
    """Return the rows for each sample of a batch, 0 where that is not a whole number."""
    if rows is None or not samples:
        return 1
    return 0 if rows % samples else rows // samples


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a batch: the length of its first tensor or, without one, plain list."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, (list, tuple)) and not any(map(_is_nested, batch)):
        return len(batch)
    if not _is_nested(batch):
        return None
    counts = map(count_samples, batch.values() if isinstance(batch, Mapping) else batch)
    return next((count for count in counts if count is not None), None)


def cut_batch(batch: Any, span: slice, samples: int) -> Any:
    """Take a span of samples: of tensors and plain lists that are `samples` long; the rest passes whole."""
    if isinstance(batch, torch.Tensor):
        return batch[span] if batch.ndim and batch.shape[0] == samples else batch
    if isinstance(batch, Mapping):
        return honor_mapping(batch, {key: cut_batch(value, span, samples) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if any(map(_is_nested, batch)):
            return honor_type(batch, (cut_batch(item, span, samples) for item in batch))
        return batch[span] if len(batch) == samples else batch
    return batch


def _is_nested(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, Mapping, list, tuple))


@dataclass(slots=True)
class Tagged:
    """A sample with the counts of its batch, between a dataset in a worker and the collate function."""

    sample: Any
    counts: Counts


@dataclass(slots=True)
class Counted:
    """A collated batch with its counts, between a worker and the main process."""

    batch: Any
    counts: Counts

    def pin_memory(self, device: Any = None) -> Counted:
        """Pin the batch inside; torch's pin thread calls this."""
        return Counted(torch_private.pin_memory(self.batch, device), self.counts)


@dataclass(frozen=True)
class CountingCollate:
    """The user's collate function; the counts of the first sample are returned with the batch."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        first = samples[0] if type(samples) is list and samples else samples
        if type(first) is not Tagged:
            return self.collate(samples)
        plain = [first.sample, *samples[1:]] if samples is not first else first.sample
        return Counted(self.collate(plain), first.counts)


def untagged(batches: Iterator[Any], fillers: Fillers) -> Iterator[Any]:
    """Yield the batches without their counts, which are written to `fillers`."""
    for number, batch in enumerate(batches):
        if type(batch) is Counted:
            fillers[number] = batch.counts
            yield batch.batch
        else:
            yield batch


def in_samples(counts: Counts | None, loader: Any, batch: Any) -> Counts | None:
    """Turn the counts of a batch into samples where they count whole batches."""
    if counts is None or not loader.counts_batches:
        return counts
    size = ignorant_find_batch_size(batch) or 1
    return tuple(count * size for count in counts)


def last_remainder(loader: Any) -> int:
    """Return how many samples of the last global batch are real; 0: all of them, -1: not known."""
    if loader._drop_last:
        return -1
    if loader.valid_counts is not None:
        return sum(loader.valid_counts)
    return -1 if loader.plan.how == "already_sharded" else _remainder_of_length(loader)


def remainder_ahead(loader: Any) -> int:
    """Return what `last_remainder` returns at the end of a pass that begins, where it is known by then."""
    plan = getattr(loader, "plan", None)
    if plan is None or loader._drop_last or plan.own_shares or plan.how == "dispatch":
        return -1
    return _remainder_of_length(loader)


def _remainder_of_length(loader: Any) -> int:
    whole, length = loader.total_batch_size, length_of(loader.get_sampler())
    if length is None:
        dataset = loader.dataset
        length = length_of(dataset.dataset if hasattr(dataset, "part_size") else dataset)
    return -1 if not whole or length is None else length % whole


def length_of(sized: Any) -> int | None:
    if not hasattr(sized, "__len__"):
        return None
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a wrapper around an object without a length
        return None
