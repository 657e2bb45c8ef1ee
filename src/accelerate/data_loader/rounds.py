"""Share read batches out in rounds: one part for each group, with nothing lost and the short end filled.

Used where one process reads for all; pure, so it runs and is tested without processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch

from accelerate.base import PreparationError
from accelerate.data_loader.validity import Counts, real_per_part
from accelerate.nested import concatenate, honor_mapping, honor_type

Cut = Callable[..., Any]


@dataclass(frozen=True)
class Round:
    """One step of all groups.

    Attributes:
        parts: The batch of each group.
        is_last: Whether this is the last round of the pass.
        counts: Real samples in each part, None when all are and the parts have equally many.
        note: What was noted of the source when this round was complete.
    """

    parts: list[Any]
    is_last: bool
    counts: Counts | None = None
    note: Any = None


@dataclass(frozen=True)
class Dealer:
    """Deals batches to groups; the last round is cut in equal parts, filled from the beginning of the epoch.

    Attributes:
        groups: How many groups there are.
        split: Cut each batch in `groups` parts, instead of giving each group a batch of its own.
        drop_last: Leave out a last round that doesn't reach all groups with a batch of their own.
        cut: The user's `slice_fn(batch, slice, process_index=, num_processes=)`; None cuts tensors and lists.
    """

    groups: int
    split: bool = False
    drop_last: bool = False
    cut: Cut | None = None

    @property
    def take(self) -> int:
        """How many batches one round takes."""
        return 1 if self.split else self.groups

    def rounds(
        self,
        batches: Iterator[Any],
        note: Callable[[], Any] | None = None,
        first: list[Any] | None = None,
    ) -> Iterator[Round]:
        """Deal batches until there are none left, reading one round ahead.

        Args:
            batches: Where they come from.
            note: Gives the states of the source. Called when a round is complete, before the next one is
                read, and once more when the last one turns out to be it.
            first: The first round of the epoch, where these batches begin later; None: they begin there.
        """
        current = self.read(batches)
        first = first or current
        while current:
            noted = note() if note else None
            upcoming = self.read(batches)
            dealt = self._deal(current, first, is_last=not upcoming)
            yield replace(dealt, note=noted if upcoming or note is None else note())
            current = upcoming

    def read(self, batches: Iterator[Any]) -> list[Any]:
        """Read one round; empty at the end."""
        read = list(islice(batches, self.take))
        return [] if self.drop_last and len(read) < self.take else read

    def _deal(self, batches: list[Any], first: list[Any], *, is_last: bool) -> Round:
        if self._deals_whole(batches, is_last=is_last):
            return Round(batches, is_last, _uneven_counts(batches))
        whole = batches[0] if len(batches) == 1 else concatenate(batches)
        samples = self._count(whole)
        part = -(-samples // self.groups)
        counts = real_per_part(samples, part, self.groups)
        missing = part * self.groups - samples
        if missing:
            whole = concatenate([whole, *fill(first, missing)])
        parts = [self._slice(whole, index, part, samples + missing) for index in range(self.groups)]
        return Round(parts, is_last, tuple(counts) if missing else None)

    def _deals_whole(self, batches: list[Any], *, is_last: bool) -> bool:
        """Whether groups get batches as they were read: all but the end of an epoch."""
        if self.split or self.cut is not None:
            return False
        if not is_last:
            return True
        return len(batches) == self.groups and len({count_samples(batch) for batch in batches}) == 1

    def _count(self, batch: Any) -> int:
        samples = count_samples(batch)
        if samples is None:
            raise PreparationError(
                f"A batch of type {type(batch).__name__} cannot be cut for {self.groups} processes. Give "
                "slice_fn_for_dispatch, or set drop_last=True, or dispatch_batches=False."
            )
        return samples

    def _slice(self, whole: Any, index: int, part: int, samples: int) -> Any:
        span = slice(index * part, (index + 1) * part)
        if self.cut is not None:
            return self.cut(whole, span, process_index=index, num_processes=self.groups)
        return cut_batch(whole, span, samples)


def _uneven_counts(batches: list[Any]) -> Counts | None:
    """The samples of batches dealt whole, where groups get different numbers and all can be counted."""
    sizes = [count_samples(batch) for batch in batches]
    if len(set(sizes)) == 1 or None in sizes:
        return None
    return tuple(size for size in sizes if size is not None)


def count_samples(batch: Any) -> int | None:
    """The number of samples in a batch: the length of its first tensor or, without one, plain list."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        return _first_count(batch.values())
    if isinstance(batch, (list, tuple)):
        return _first_count(batch) if any(map(_is_deeper, batch)) else len(batch)
    return None


def cut_batch(batch: Any, span: slice, samples: int) -> Any:
    """Take a span of samples: of tensors and plain lists that are `samples` long; the rest passes whole."""
    if isinstance(batch, torch.Tensor):
        return batch[span] if batch.ndim and batch.shape[0] == samples else batch
    if isinstance(batch, Mapping):
        return honor_mapping(batch, {key: cut_batch(value, span, samples) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if any(map(_is_deeper, batch)):
            return honor_type(batch, (cut_batch(item, span, samples) for item in batch))
        return batch[span] if len(batch) == samples else batch
    return batch


def _is_deeper(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, Mapping, list, tuple))


def _first_count(items: Any) -> int | None:
    counts = chain((c for c in map(count_samples, items) if c is not None), (None,))
    return next(counts)


def fill(first: list[Any], missing: int) -> Iterator[Any]:
    """Give batches of `missing` samples in all, from the beginning of the pass, over again if that is short.

    Args:
        first: The batches that the pass began with.
        missing: How many samples.
    """
    beginning = first[0] if len(first) == 1 else concatenate(first)
    samples = count_samples(beginning) or 1
    while missing > 0:
        yield cut_batch(beginning, slice(0, min(missing, samples)), samples)
        missing -= samples
