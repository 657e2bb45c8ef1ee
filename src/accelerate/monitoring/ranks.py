"""How fast each rank is in its own work: summaries that ranks join in a tree, and which rank is too slow.

A rank posts one summary: of itself and of the ranks below it in the tree. So none reads the values of more
than `FAN_OUT` ranks, and what is posted does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from accelerate.monitoring.step_clock import StepTimes

FAN_OUT = 16
MOST_NAMED = 8
"""The slowest ranks that a summary names."""
SLOW = 0.25
"""By what part of their mean a rank is slower than the others to count as slow."""
COMPARISONS = 3
"""Comparisons in a row in which a rank is slow, from which on it is reported."""
_OTHERS_WORK = ("collectives", "saving")


@dataclass(frozen=True)
class RankSummary:
    """Seconds of own work per step of some ranks."""

    number: int  # of the post of its rank: one that stays the same is old
    ranks: int
    step: int  # the last step of the rank that posts it
    least: float
    total: float
    most: float
    slowest: list[int]  # the slowest ranks, the slowest first
    seconds: list[float]  # of each of these


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others, in its own work."""

    rank: int
    slowdown: float  # 0.25 for 25 % more than the mean of the others
    since: int  # step


def own_seconds(times: StepTimes) -> float:
    """Return the seconds of own work per step: all but waiting for other ranks and saving."""
    waits = sum(times.seconds_by[name] for name in _OTHERS_WORK)
    return max(times.seconds - waits, 0.0) / times.steps if times.steps else 0.0


def summary_of(rank: int, number: int, step: int, times: StepTimes) -> RankSummary:
    seconds = own_seconds(times)
    return RankSummary(number, 1, step, seconds, seconds, seconds, [rank], [seconds])


def join_summaries(own: RankSummary, others: Iterable[RankSummary]) -> RankSummary:
    """Return the summary of all ranks in several ones."""
    every = [own, *others]
    pairs = [pair for each in every for pair in zip(each.seconds, each.slowest, strict=False)]
    named = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:MOST_NAMED]
    return RankSummary(
        own.number,
        sum(each.ranks for each in every),
        own.step,
        min(each.least for each in every),
        sum(each.total for each in every),
        max(each.most for each in every),
        [rank for _, rank in named],
        [seconds for seconds, _ in named],
    )


def children_of(rank: int, size: int) -> Sequence[int]:
    """Return the ranks whose summaries a rank reads; rank 0 is the root of the tree."""
    return range(min(FAN_OUT * rank + 1, size), min(FAN_OUT * (rank + 1) + 1, size))


@dataclass
class Comparisons:
    """Which ranks are slow, over several comparisons in a row."""

    since: dict[int, int] = field(default_factory=dict)  # slow rank -> step of the first comparison
    rounds: dict[int, int] = field(default_factory=dict)  # slow rank -> comparisons in a row
    number: int = 0  # of comparisons
    _slow: dict[int, float] = field(default_factory=dict)

    def add(self, summary: RankSummary) -> dict[int, float]:
        """Return the slow ranks of one comparison, with how much slower than the mean of the others."""
        self.number += 1
        slow = {}
        for rank, seconds in zip(summary.slowest, summary.seconds, strict=False):
            mean = (summary.total - seconds) / (summary.ranks - 1) if summary.ranks > 1 else 0.0
            if mean > 0 and seconds > (1 + SLOW) * mean:
                slow[rank] = seconds / mean - 1
        self.since = {rank: self.since.get(rank, summary.step) for rank in slow}
        self.rounds = {rank: self.rounds.get(rank, 0) + 1 for rank in slow}
        self._slow = slow
        return slow

    def are_even(self) -> bool:
        """Whether there were comparisons enough, and no rank is slow in the last one."""
        return self.number >= COMPARISONS and not self.rounds

    def straggler(self) -> Straggler | None:
        """Return the slowest rank of those that were slow in each of the last comparisons."""
        lasting = [rank for rank, rounds in self.rounds.items() if rounds >= COMPARISONS]
        if not lasting:
            return None
        rank = max(lasting, key=self._slow.__getitem__)
        return Straggler(rank, self._slow[rank], self.since[rank])
