"""Join of ranks whose dataset shards have uneven lengths, so that all ranks end together.

`DataLoaderShard` reads through it if the dataset makes a shard for each data-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.base import PreparationError
from accelerate.data_loader.last_batch import (
    Counts,
    PaddingRecord,
    PaddingSource,
    can_join,
    count_samples,
    first_samples,
    join,
)
from accelerate.data_loader.reading import LastMark
from accelerate.ops import Transport

_END = object()


@dataclass(frozen=True)
class DatasetJoin:
    """Join of ranks with uneven shards, which yields a batch in every step as long as any rank has one.

    If a rank has fewer samples than the others in a step, or none, its batch is padded from the first batch
    of its shard. One small collective in each step exchanges the number of samples of each rank. It runs for
    the next step before a batch is yielded, so every rank knows which batch is the last.

    Attributes:
        group_of: The data-parallel group of each rank.
        padding_source: The first batch of the shard of this rank; empty if it is not read yet.
        pads_short: Whether a short batch is padded; otherwise only a missing one is replaced.
        drop_last: Whether to end when the first rank ends, instead of padding.
    """

    transport: Transport
    group_of: Sequence[int]
    padding_source: PaddingSource
    pads_short: bool
    drop_last: bool

    def take(
        self,
        batches: Iterator[Any],
        mark: LastMark,
        capture: Callable[[], Any] | None,
        keep: Callable[[Any, bool], None],
        number: int,
        padding_record: PaddingRecord,
        ended: object = None,
    ) -> Iterator[Any]:
        """Yields the batches of this rank.

        After its end a shard would begin again. A rank whose shard ends before those of others therefore
        keeps the state before its last batch, which is to be read again and dropped.

        Args:
            batches: The batches of the shard.
            capture: Function that captures the state of the shard; None without one.
            keep: Called with the state after each batch, and whether the state is that of an ended shard.
            number: Number of the first batch.
            padding_record: Gets the counts of all ranks, for batches in which they differ and for the last
                one.
            ended: The state of an ended shard, if this pass begins with one.
        """
        goes_on: Callable[[Counts], bool] = all if self.drop_last else any
        before = capture() if capture else None
        current = next(batches, _END)
        if begins := not self.padding_source.items:
            self.padding_source.items = [current]
        is_over = current is _END
        state = capture() if capture and not is_over else ended
        counts = self._exchange(current)
        if begins and not self.drop_last:
            _check_no_shard_is_empty(counts)
        while goes_on(counts):
            upcoming = next(batches, _END)
            upcoming_state = capture() if capture and upcoming is not _END else None
            if upcoming is _END and not is_over:
                state, is_over = before, True
            upcoming_counts = self._exchange(upcoming)
            mark.is_last = not goes_on(upcoming_counts)
            if capture:
                keep(capture() if mark.is_last else state, is_over and not mark.is_last)
            if mark.is_last or len(set(counts)) > 1:
                padding_record[number] = counts
            yield self._padded(current, counts)
            before, current, counts = state, upcoming, upcoming_counts
            state = state if is_over else upcoming_state
            number += 1

    def _exchange(self, batch: object) -> Counts:
        """Returns the samples in the batches of all groups in this step, 1 for a batch without a length."""
        samples = 0 if batch is _END else count_samples(batch)
        gathered = self.transport.gather(torch.tensor([1 if samples is None else samples])).tolist()
        return tuple(gathered[self.group_of.index(group)] for group in sorted(set(self.group_of)))

    def _padded(self, batch: Any, counts: Counts) -> Any:
        first = self.padding_source.items
        if not self.pads_short:
            return first[0] if batch is _END else batch
        real = [] if batch is _END else [batch]
        missing = max(counts) - sum(count_samples(batch) or 1 for batch in real)
        filling = first if can_join([*real, *first]) else real  # samples of another shape, as with padding
        return join([*real, *first_samples(filling, missing)])


def _check_no_shard_is_empty(counts: Counts) -> None:
    empty = [group for group, count in enumerate(counts) if not count]
    if empty and any(counts):
        raise PreparationError(
            f"The dataset shards itself, and the shards {empty} of {len(counts)} are empty, so that "
            "there is nothing to pad their batches with. Give the dataset at least as many shards as "
            "there are processes, or prepare its loader with dispatch_batches=True."
        )
