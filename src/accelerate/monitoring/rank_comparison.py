"""Comparison of the compute time per step of all ranks, over a tree of ranks in the store.

The thread of `run_monitor.py` calls `RankExchange.exchange`, so training does not wait for it. A rank posts
one summary of itself and of the ranks below it in the tree. So no rank reads the values of more than
`FAN_OUT` ranks, and the posted values do not grow with the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from accelerate.monitoring.records import RankTimes
from accelerate.monitoring.step_clock import StepTimes

FAN_OUT = 16
MAX_NAMED_RANKS = 8
"""Number of the slowest ranks that a summary names."""
SLOW = 0.25
"""Part of the mean by which a slow rank is slower than the others."""
COMPARISONS = 3
"""Number of comparisons in a row after which a slow rank is reported."""
MIN_INTERVAL, MAX_INTERVAL = 2.0, 10.0
"""Bounds of the seconds between two comparisons, which grow with the world size."""
RANKS_PER_SECOND = 400
"""Number of ranks for which the interval becomes one second longer."""
SUMMARY_TIMEOUT = 60.0
"""Seconds after which the summary of a rank that posts no new one is left out."""


class Channel(Protocol):
    """Access to the store."""

    def post(self, name: str, value: object) -> None:
        """Writes a value."""

    def read(self, name: str) -> Any:
        """Returns a value, or None."""

    def wait(self, names: Sequence[str], timeout: float) -> dict[str, Any]:
        """Returns the values that exist, by name."""


@dataclass(frozen=True)
class ComputeSummary:
    """Seconds of compute per step of some ranks."""

    number: int  # number of the post of the rank, which is the same for an old one
    ranks: int
    step: int  # last step of the rank that posts it
    least: float
    total: float
    most: float
    slowest: list[int]  # the slowest ranks in descending order
    seconds: list[float]  # of each of these


@dataclass(frozen=True)
class Straggler:
    """Rank that is slower than the others in its own compute."""

    rank: int
    slowdown: float  # 0.25 for 25 % more than the mean of the others
    since: int  # step


def compute_seconds(times: StepTimes) -> float:
    """Returns the seconds per step without waiting for other ranks and without saving."""
    waits = times.seconds_by["collectives"] + times.seconds_by["saving"]
    return max(times.seconds - waits, 0.0) / times.steps if times.steps else 0.0


def summarize_rank(rank: int, number: int, step: int, times: StepTimes) -> ComputeSummary:
    seconds = compute_seconds(times)
    return ComputeSummary(number, 1, step, seconds, seconds, seconds, [rank], [seconds])


def join_summaries(own: ComputeSummary, others: Iterable[ComputeSummary]) -> ComputeSummary:
    """Returns one summary of all ranks of several summaries."""
    summaries = [own, *others]
    pairs = [pair for summary in summaries for pair in zip(summary.seconds, summary.slowest, strict=False)]
    named = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:MAX_NAMED_RANKS]
    return ComputeSummary(
        own.number,
        sum(summary.ranks for summary in summaries),
        own.step,
        min(summary.least for summary in summaries),
        sum(summary.total for summary in summaries),
        max(summary.most for summary in summaries),
        [rank for _, rank in named],
        [seconds for seconds, _ in named],
    )


def children_of(rank: int, size: int) -> Sequence[int]:
    """Returns the ranks whose summaries a rank reads, in a tree with rank 0 as its root."""
    return range(min(FAN_OUT * rank + 1, size), min(FAN_OUT * (rank + 1) + 1, size))


@dataclass
class Comparisons:
    """Slow ranks of several comparisons in a row."""

    since: dict[int, int] = field(default_factory=dict)  # slow rank -> step of the first comparison
    in_a_row: dict[int, int] = field(default_factory=dict)  # slow rank -> number of comparisons
    number: int = 0
    _slow: dict[int, float] = field(default_factory=dict)

    def add(self, summary: ComputeSummary) -> dict[int, float]:
        """Returns the slow ranks of a comparison, with their excess over the mean of the others."""
        self.number += 1
        slow = {}
        for rank, seconds in zip(summary.slowest, summary.seconds, strict=False):
            mean = (summary.total - seconds) / (summary.ranks - 1) if summary.ranks > 1 else 0.0
            if mean > 0 and seconds > (1 + SLOW) * mean:
                slow[rank] = seconds / mean - 1
        self.since = {rank: self.since.get(rank, summary.step) for rank in slow}
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in slow}
        self._slow = slow
        return slow

    def are_even(self) -> bool:
        """Returns whether there were enough comparisons, and no rank is slow in the last one."""
        return self.number >= COMPARISONS and not self.in_a_row

    def straggler(self) -> Straggler | None:
        """Returns the slowest rank of those that were slow in each of the last comparisons, or None."""
        lasting = [rank for rank, number in self.in_a_row.items() if number >= COMPARISONS]
        if not lasting:
            return None
        rank = max(lasting, key=self._slow.__getitem__)
        return Straggler(rank, self._slow[rank], self.since[rank])


@dataclass(frozen=True)
class ExchangeResult:
    """Result of a comparison, which rank 0 posts with the straggler, or -1 for none."""

    straggler: int = -1
    slowdown: float = 0.0
    since: int = 0
    are_even: bool = False


@dataclass
class RankExchange:
    """Client of one rank for the comparison, which is used in one thread."""

    channel: Channel
    # Function that returns a message of a class from a value of the store, or None for any other value.
    as_dataclass: Callable[[type[Any], Any], Any]
    rank: int  # rank of this process
    size: int
    is_first: bool = True  # True for one rank of each node, which reads the result
    result: ExchangeResult = field(default_factory=ExchangeResult)
    times: RankTimes | None = None  # last comparison on rank 0, until the monitor records it
    missing: int = 0  # number of ranks that the last comparison on rank 0 left out
    _number: int = 0
    # Child in the tree -> number of its last summary, and time of its arrival.
    _arrivals: dict[int, tuple[int, float]] = field(default_factory=dict)
    _comparisons: Comparisons = field(default_factory=Comparisons)

    @property
    def interval(self) -> float:
        return min(max(self.size / RANKS_PER_SECOND, MIN_INTERVAL), MAX_INTERVAL)

    @property
    def straggler(self) -> Straggler | None:
        result = self.result
        return Straggler(result.straggler, result.slowdown, result.since) if result.straggler >= 0 else None

    def exchange(self, step: int, times: StepTimes) -> None:
        """Posts the summary of this rank and its children in the tree, and reads the result of rank 0.

        It makes at most four requests.
        """
        self._number += 1
        own = summarize_rank(self.rank, self._number, step, times)
        summary = join_summaries(own, self._read_children())
        if self.rank == 0:
            self._compare(summary, times)
            self.channel.post("result", asdict(self.result))
            return
        self.channel.post(str(self.rank), asdict(summary))
        if self.is_first:
            self.result = self.as_dataclass(ExchangeResult, self.channel.read("result")) or self.result

    def _read_children(self) -> Sequence[ComputeSummary]:
        children = children_of(self.rank, self.size)
        if not children:
            return []
        values = self.channel.wait([str(child) for child in children], 0.0)
        summaries = (self.as_dataclass(ComputeSummary, value) for value in values.values())
        pairs = zip(children, summaries, strict=True)
        return [summary for child, summary in pairs if summary is not None and self._is_new(child, summary)]

    def _is_new(self, child: int, summary: ComputeSummary) -> bool:
        number, arrival = self._arrivals.get(child, (-1, 0.0))
        if number != summary.number:
            arrival = time.monotonic()
            self._arrivals[child] = summary.number, arrival
        return time.monotonic() - arrival < SUMMARY_TIMEOUT

    def _compare(self, summary: ComputeSummary, times: StepTimes) -> None:
        slow = self._comparisons.add(summary)
        self.missing = self.size - summary.ranks
        straggler = self._comparisons.straggler()
        values = (straggler.rank, straggler.slowdown, straggler.since) if straggler else (-1, 0.0, 0)
        self.result = ExchangeResult(*values, self._comparisons.are_even())
        self.times = RankTimes(
            time=time.time(),
            first=max(summary.step - times.steps + 1, 1),
            last=summary.step,
            compute={"least": summary.least, "mean": summary.total / summary.ranks, "most": summary.most},
            slowest=summary.slowest[0],
            slow={str(rank): slowdown for rank, slowdown in slow.items()},
        )
