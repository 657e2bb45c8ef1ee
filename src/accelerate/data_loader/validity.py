"""Which samples of a batch are real, and which only pad the end of the epoch.

Every process sees the order of the whole epoch, so every process knows the counts of all without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Counts = tuple[int, ...]
Fillers = dict[int, Counts]
"""Number of the batch in its pass -> real samples on each data-parallel rank; only batches with filler."""


def real_per_part(samples: int, part: int, parts: int) -> list[int]:
    """How many of `samples`, laid out over `parts` consecutive parts of `part` places, fall in each part."""
    return [min(max(samples - index * part, 0), part) for index in range(parts)]


@dataclass(slots=True)
class Tagged:
    """A sample that carries, from a dataset in a worker to the collate function, the counts of its batch."""

    sample: Any
    counts: Counts


@dataclass(slots=True)
class Counted:
    """A collated batch that carries its counts from a worker to the main process."""

    batch: Any
    counts: Counts

    def pin_memory(self, device: Any = None) -> Counted:
        """Pin the batch inside; torch's pin thread calls this."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Counted(pin_memory(self.batch, device), self.counts)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class CountingCollate:
    """The user's collate function, with the tag of the first sample handed on beside the batch."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        head = samples[0] if type(samples) is list and samples else samples
        if type(head) is not Tagged:
            return self.collate(samples)
        plain = [head.sample, *samples[1:]] if samples is not head else head.sample
        return Counted(self.collate(plain), head.counts)


def untagged(batches: Iterator[Any], fillers: Fillers) -> Iterator[Any]:
    """The batches without their tags; the counts that were on them are written to `fillers`."""
    for number, batch in enumerate(batches):
        if type(batch) is Counted:
            fillers[number] = batch.counts
            yield batch.batch
        else:
            yield batch
