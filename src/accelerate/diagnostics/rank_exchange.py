"""Comparison of the compute time per step of all ranks, over a tree of ranks in the store.

The thread of `run_monitor` calls it, so training does not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from accelerate.monitoring import (
    Comparisons,
    RankSummary,
    RankTimes,
    StepTimes,
    Straggler,
    children_of,
    join_summaries,
    summary_of,
)
from accelerate.state import StoreChannel, as_dataclass

MIN_INTERVAL, MAX_INTERVAL = 2.0, 10.0
"""Bounds of the seconds between two comparisons, which grow with the world size."""
RANKS_PER_SECOND = 400
"""Number of ranks per second of the interval."""
SUMMARY_TIMEOUT = 60.0
"""Seconds after which the summary of a rank that posts no new one is left out."""


@dataclass
class LastSummary:
    """Last summary of a child in the tree, with the time of its arrival."""

    number: int = -1
    time: float = 0.0


@dataclass(frozen=True)
class ExchangeResult:
    """Result of a comparison, which rank 0 posts with the slowest rank and the straggler, or -1 for none."""

    slowest: int = -1
    slowest_by: float = 0.0  # relative excess over the mean time of the other ranks
    straggler: int = -1
    slowdown: float = 0.0
    since: int = 0
    are_even: bool = False


@dataclass
class RankExchange:
    """Client of one rank for the comparison, which is used in one thread.

    `is_first` is True for one rank of each node, which reads the result.
    """

    channel: StoreChannel
    rank: int
    size: int
    is_first: bool = True
    result: ExchangeResult = field(default_factory=ExchangeResult)
    times: RankTimes | None = None  # on rank 0, the last comparison until the monitor records it
    missing: int = 0  # on rank 0, the number of ranks that the last comparison left out
    _number: int = 0
    _last_summaries: dict[int, LastSummary] = field(default_factory=dict)
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
        own = summary_of(self.rank, self._number, step, times)
        summary = join_summaries(own, self._read_children())
        if self.rank == 0:
            self._compare(summary, times)
            self.channel.post("result", asdict(self.result))
            return
        self.channel.post(str(self.rank), asdict(summary))
        if self.is_first:
            self.result = as_dataclass(ExchangeResult, self.channel.read("result")) or self.result

    def _read_children(self) -> Sequence[RankSummary]:
        children = children_of(self.rank, self.size)
        if not children:
            return []
        values = self.channel.wait([str(child) for child in children], 0.0)
        summaries = (as_dataclass(RankSummary, value) for value in values.values())
        pairs = zip(children, summaries, strict=True)
        return [summary for child, summary in pairs if summary is not None and self._is_new(child, summary)]

    def _is_new(self, child: int, summary: RankSummary) -> bool:
        last = self._last_summaries.setdefault(child, LastSummary())
        if last.number != summary.number:
            self._last_summaries[child] = last = LastSummary(summary.number, time.monotonic())
        return time.monotonic() - last.time < SUMMARY_TIMEOUT

    def _compare(self, summary: RankSummary, times: StepTimes) -> None:
        slow = self._comparisons.add(summary)
        self.missing = self.size - summary.ranks
        straggler = self._comparisons.straggler()
        values = (straggler.rank, straggler.slowdown, straggler.since) if straggler else (-1, 0.0, 0)
        others = (summary.total - summary.most) / max(summary.ranks - 1, 1)
        slowest_by = summary.most / others - 1 if others else 0.0
        self.result = ExchangeResult(summary.slowest[0], slowest_by, *values, self._comparisons.are_even())
        mean = summary.total / summary.ranks
        self.times = RankTimes(
            time=time.time(),
            first=max(summary.step - times.steps + 1, 1),
            last=summary.step,
            compute={"least": summary.least, "mean": mean, "most": summary.most},
            slowest=summary.slowest[0],
            slow={str(rank): slowdown for rank, slowdown in slow.items()},
        )
