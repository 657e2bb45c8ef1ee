"""Ranks with uneven shares of a dataset end together: a rank without samples repeats its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.base import PreparationError
from accelerate.data_loader.last_batch import (
    Counts,
    Fillers,
    FirstRound,
    count_samples,
    first_samples,
    join,
)
from accelerate.ops import Transport

_END = object()


@dataclass(frozen=True)
class Join:
    """Joins ranks with uneven shares: each takes a batch in every round, as long as any rank has one.

    The batch of a rank that has fewer samples than the others in a round, or none, is filled from the first
    batch of its share. One small collective in each round exchanges how many samples each rank has; it runs
    for the next round before a batch is yielded, so every rank knows which batch is the last.
    """

    transport: Transport
    group_of: Sequence[int]
    first_round: FirstRound  # the first batch of this rank's share; empty where that is not read yet
    fills_short: bool  # whether a short batch is filled; otherwise only a missing one is replaced
    drop_last: bool  # end when the first rank does, instead of filling

    def take(
        self,
        batches: Iterator[Any],
        capture: Callable[[], Any] | None,
        keep: Callable[[Any, bool], None],
        number: int,
        fillers: Fillers,
        ended: Any = None,
    ) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of this rank, each with whether it is the last one; `fillers` gets the real
        samples of each rank, for batches where they differ and the last.

        `keep` gets the state behind each batch. Behind its end a share would begin anew, so a rank whose
        share ends before those of others keeps the state in front of its last batch, and True: that batch is
        to be read again and dropped. `ended` is such a state, where this pass begins with one.
        """
        goes_on: Callable[[Counts], bool] = all if self.drop_last else any
        before = capture() if capture else None
        current = next(batches, _END)
        if begins := not self.first_round.items:
            self.first_round.items = [current]
        is_over = current is _END
        state = capture() if capture and not is_over else ended
        counts = self._exchange(current)
        empty = [group for group, count in enumerate(counts) if not count]
        if begins and not self.drop_last and empty and any(counts):
            raise PreparationError(
                f"The dataset shards itself, and the shares {empty} of {len(counts)} are empty, so that "
                "there is nothing to fill their batches with. Give the dataset at least as many shards as "
                "there are processes, or prepare its loader with dispatch_batches=True."
            )
        while goes_on(counts):
            upcoming = next(batches, _END)
            upcoming_state = capture() if capture and upcoming is not _END else None
            if upcoming is _END and not is_over:
                state, is_over = before, True
            upcoming_counts = self._exchange(upcoming)
            is_last = not goes_on(upcoming_counts)
            if capture:
                keep(capture() if is_last else state, is_over and not is_last)
            if is_last or len(set(counts)) > 1:
                fillers[number] = counts
            yield self._filled(current, counts), is_last
            before, current, counts = state, upcoming, upcoming_counts
            state = state if is_over else upcoming_state
            number += 1

    def _exchange(self, batch: Any) -> Counts:
        """The samples of this round's batch on each group; a batch that cannot be counted is one."""
        samples = 0 if batch is _END else count_samples(batch)
        gathered = self.transport.gather(torch.tensor([1 if samples is None else samples])).tolist()
        return tuple(gathered[self.group_of.index(group)] for group in sorted(set(self.group_of)))

    def _filled(self, batch: Any, counts: Counts) -> Any:
        first = self.first_round.items
        if not self.fills_short:
            return first[0] if batch is _END else batch
        real = [] if batch is _END else [batch]
        missing = max(counts) - sum(count_samples(batch) or 1 for batch in real)
        return join([*real, *first_samples(first, missing)])
