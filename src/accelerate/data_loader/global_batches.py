"""Global batches of a dispatched loader, which rank 0 builds from the batches that it reads.

`DataLoaderDispatcher` builds them, and `dispatch_transport.py` sends their parts to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from accelerate.base import PreparationError
from accelerate.data_loader.last_batch import (
    Counts,
    can_cut,
    can_join,
    count_samples,
    cut_batch,
    first_samples,
    full_rows,
    has_entries,
    join,
    pad,
    samples_per_part,
)
from accelerate.data_loader.reading import read_one_ahead
from accelerate.data_loader.sample_lists import hide_samples, show_samples


@dataclass(frozen=True)
class GlobalBatch:
    """Batches of all data-parallel groups in one step."""

    parts: list[Any]  # the batch of each group
    is_last: bool  # of the epoch
    counts: Counts | None = None  # real samples of each part; None if all parts are full
    state: Any = None  # of the source, after the batches


@dataclass(frozen=True)
class GlobalBatchBuilder:
    """Builder of global batches, of which the last one is padded from the beginning of the epoch.

    If the last batches cannot be joined or cut, because their samples have different shapes or not all leaves
    have one row for each sample, groups get whole batches of different sizes.
    """

    groups: int
    split: bool = False  # split each batch into `groups` parts, instead of reading one for each group
    drop_last: bool = False  # drop a last global batch that does not have a batch for each group
    cut: Callable[..., Any] | None = None  # the `slice_fn` of the user; None cuts tensors and lists
    nominal_rows: int | None = None  # the declared batch size of one group

    @property
    def num_batches(self) -> int:
        """Number of batches that one global batch is built from."""
        return 1 if self.split else self.groups

    def build(
        self, batches: Iterator[Any], capture: Callable[[], Any] | None = None, first: list[Any] | None = None
    ) -> Iterator[GlobalBatch]:
        """Yields global batches until there are no batches left, reading one global batch ahead.

        Args:
            batches: The batches.
            capture: Function that returns the state of the source; None without one.
            first: The batches of the first global batch of the epoch, if `batches` begin later.
        """
        for current, state, is_last in read_one_ahead(iter(lambda: self.read(batches), []), capture):
            first = first or current
            yield replace(self._build_one(current, first, is_last=is_last), state=state)

    def read(self, batches: Iterator[Any]) -> list[Any]:
        """Reads the batches of one global batch, none at the end."""
        read = list(islice(batches, self.num_batches))
        return [] if self.drop_last and len(read) < self.num_batches else read

    def _build_one(self, batches: list[Any], first: list[Any], *, is_last: bool) -> GlobalBatch:
        nominal = self.nominal_rows and self.nominal_rows * (self.groups if self.split else 1)
        hidden = hide_samples([*batches, *first], nominal) if self.cut is None else None
        if hidden is None:
            return self._build_parts(batches, first, is_last=is_last)
        count = len(batches)
        built = self._build_parts(hidden[:count], hidden[count:], is_last=is_last)
        return replace(built, parts=list(map(show_samples, built.parts)))

    def _build_parts(self, batches: list[Any], first: list[Any], *, is_last: bool) -> GlobalBatch:
        sizes = [count_samples(batch) for batch in batches]
        is_even_end = len(batches) == self.groups and len(set(sizes)) == 1
        if not self.split and self.cut is None and (is_even_end or not is_last):
            counts = [size for size in sizes if size is not None]
            is_uneven = len(set(sizes)) > 1 or self._is_short(max(counts, default=0), batches, first)
            return GlobalBatch(
                batches, is_last, tuple(counts) if is_uneven and len(counts) == len(sizes) else None
            )
        may_be_whole = not self.split and self.cut is None and None not in sizes
        if may_be_whole and (has_entries(batches) or not can_join(batches)):
            return self._of_whole_batches(batches, first)
        joined = join(batches)
        samples = count_samples(joined)
        if samples is None:
            raise PreparationError(
                f"A batch of type {type(joined).__name__} cannot be cut for {self.groups} processes. Give "
                "slice_fn_for_dispatch, or set drop_last=True, or dispatch_batches=False."
            )
        size = -(-samples // self.groups)
        missing = size * self.groups - samples
        if missing:
            filling = first if can_join([joined, *first]) else [joined]
            joined = join([joined, *first_samples(filling, missing)])
        if may_be_whole and not can_cut([joined, first[0]]):
            return self._of_whole_batches(batches, first)
        parts = []
        for group in range(self.groups):
            span = slice(group * size, (group + 1) * size)
            if self.cut is None:
                parts.append(cut_batch(joined, span, samples + missing))
            else:
                parts.append(self.cut(joined, span, process_index=group, num_processes=self.groups))
        real = tuple(samples_per_part(samples, size, self.groups))
        return GlobalBatch(parts, is_last, real if missing or self._is_short(size, batches, first) else None)

    def _of_whole_batches(self, batches: list[Any], first: list[Any]) -> GlobalBatch:
        """Returns the last global batch, in which groups without a batch get one of the first ones."""
        counts = [count_samples(batch) or 0 for batch in batches] + [0] * (self.groups - len(batches))
        return GlobalBatch(pad(batches, first, self.groups), True, tuple(counts))

    def _is_short(self, rows: int, batches: list[Any], first: list[Any]) -> bool:
        """Returns whether parts with this number of rows are smaller than those of a full global batch."""
        sizes = [size for size in map(count_samples, first) if size is not None]
        if not sizes:
            return False
        full = -(-sizes[0] // self.groups) if self.split else max(sizes)
        return rows < full_rows(self.nominal_rows, full, is_only=batches[0] is first[0])
