"""Ranks whose shares differ in length take their batches in step, and end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from accelerate.base import PreparationError
from accelerate.data_loader.rounds import count_samples, fill
from accelerate.data_loader.validity import Counts, Fillers
from accelerate.nested import concatenate
from accelerate.ops import Transport

_END = object()


class InStep:
    """Takes a batch of this rank's share in each round, as long as any rank has one.

    A rank that has fewer samples than the others in a round, or none, is filled up from the first batch of
    its share. One small collective for each round tells all ranks how many each has; it is made for the next
    round before a batch is given, so every rank knows which one is the last.

    Args:
        transport: The wire between the ranks.
        group_of: The data-parallel group of each rank.
        fills_short: Whether a short batch is filled up; otherwise only an absent one is filled in.
        drop_last: End when the first rank does, instead of filling.
    """

    def __init__(
        self, transport: Transport, group_of: Sequence[int], *, fills_short: bool, drop_last: bool
    ) -> None:
        self._transport = transport
        self._first_ranks = [group_of.index(group) for group in sorted(set(group_of))]
        self._fills_short = fills_short
        self._goes_on: Callable[[Counts], bool] = all if drop_last else any
        self.first: Any = None
        """The batch that fills: the first one of this rank's share in the epoch."""

    def take(
        self,
        batches: Iterator[Any],
        note: Callable[[], Any] | None,
        keep_note: Callable[[Any], None],
        number: int,
        fillers: Fillers,
    ) -> Iterator[tuple[Any, bool]]:
        """Give the batches of this rank, each with whether it is the last one.

        Args:
            batches: Its share; read one ahead.
            note: Takes the states of the source behind the batch just read; None: there are none.
            keep_note: called with the states of each batch before it is given.
            number: Number of the first batch.
            fillers: called with the real samples of each rank, for batches where they differ and the last.
        """
        current = next(batches, _END)
        begins = self.first is None
        if begins:
            self.first = current
        noted = note() if note else None
        counts = self._ask(current)
        if begins and self._goes_on is any:
            _refuse_empty_shares(counts)
        while self._goes_on(counts):
            upcoming = next(batches, _END)
            # Behind its end a share would begin anew: one that has run out stays right before its end.
            upcoming_noted = note() if note and upcoming is not _END else noted
            upcoming_counts = self._ask(upcoming)
            is_last = not self._goes_on(upcoming_counts)
            if note:
                keep_note(note() if is_last else noted)
            if is_last or len(set(counts)) > 1:
                fillers[number] = counts
            yield self._filled(current, counts), is_last
            current, noted, counts = upcoming, upcoming_noted, upcoming_counts
            number += 1

    def _ask(self, batch: Any) -> Counts:
        """The samples of this round's batch on each group; a batch that cannot be counted is one."""
        samples = 0 if batch is _END else count_samples(batch)
        told = self._transport.gather(torch.tensor([1 if samples is None else samples])).tolist()
        return tuple(told[rank] for rank in self._first_ranks)

    def _filled(self, batch: Any, counts: Counts) -> Any:
        if not self._fills_short:
            return self.first if batch is _END else batch
        have = [] if batch is _END else [batch]
        missing = max(counts) - sum(count_samples(each) or 1 for each in have)
        pieces = have + list(fill([self.first], missing))
        return pieces[0] if len(pieces) == 1 else concatenate(pieces)


def _refuse_empty_shares(counts: Counts) -> None:
    empty = [group for group, count in enumerate(counts) if not count]
    if empty and any(counts):
        raise PreparationError(
            f"The dataset shares itself out, and the shares {empty} of {len(counts)} are empty, so that "
            "there is nothing to fill their batches with. Give the dataset at least as many shards as there "
            "are processes, or prepare its loader with dispatch_batches=True."
        )
