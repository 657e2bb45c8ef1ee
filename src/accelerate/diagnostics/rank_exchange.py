"""Ranks compare their own work per step over the store, in a tree, from a thread beside training."""

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

SHORTEST, LONGEST = 2.0, 10.0
"""Seconds between two comparisons; more ranks compare less often."""
RANKS_PER_SECOND = 400
"""How many ranks more make that a second longer."""
OLD = 60.0
"""Seconds after which the summary of a rank that posts no other one is left out."""


@dataclass
class Seen:
    """The last summary of a rank below this one."""

    number: int = -1
    at: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What rank 0 posts for all: the slowest rank, and the one that is slow for long; -1 for none."""

    slowest: int = -1
    slowest_by: float = 0.0  # how much slower than the mean of the others
    straggler: int = -1
    slowdown: float = 0.0
    since: int = 0
    are_even: bool = False


@dataclass
class RankExchange:
    """Takes part in the comparison; used by one thread. `is_first` is set for one rank of each machine."""

    channel: StoreChannel
    rank: int
    size: int
    is_first: bool = True
    verdict: Verdict = field(default_factory=Verdict)
    times: RankTimes | None = None  # on rank 0: the last comparison, until it is taken
    missing: int = 0  # on rank 0: how many ranks the last comparison left out
    _number: int = 0
    _seen: dict[int, Seen] = field(default_factory=dict)
    _comparisons: Comparisons = field(default_factory=Comparisons)

    @property
    def interval(self) -> float:
        return min(max(self.size / RANKS_PER_SECOND, SHORTEST), LONGEST)

    @property
    def straggler(self) -> Straggler | None:
        known = self.verdict
        return Straggler(known.straggler, known.slowdown, known.since) if known.straggler >= 0 else None

    def look(self, step: int, times: StepTimes) -> None:
        """Post the summary of this rank and those below it; read what rank 0 says. At most four requests."""
        self._number += 1
        own = summary_of(self.rank, self._number, step, times)
        summary = join_summaries(own, self._read_children())
        if self.rank == 0:
            self._judge(summary, times)
            self.channel.post("verdict", asdict(self.verdict))
            return
        self.channel.post(str(self.rank), asdict(summary))
        if self.is_first:
            self.verdict = as_dataclass(Verdict, self.channel.read("verdict")) or self.verdict

    def _read_children(self) -> Sequence[RankSummary]:
        children = children_of(self.rank, self.size)
        if not children:
            return []
        values = self.channel.wait([str(child) for child in children], 0.0)
        summaries = (as_dataclass(RankSummary, value) for value in values.values())
        pairs = zip(children, summaries, strict=True)
        return [summary for child, summary in pairs if summary is not None and self._is_new(child, summary)]

    def _is_new(self, child: int, summary: RankSummary) -> bool:
        seen = self._seen.setdefault(child, Seen())
        if seen.number != summary.number:
            self._seen[child] = seen = Seen(summary.number, time.monotonic())
        return time.monotonic() - seen.at < OLD

    def _judge(self, summary: RankSummary, times: StepTimes) -> None:
        slow = self._comparisons.add(summary)
        self.missing = self.size - summary.ranks
        straggler = self._comparisons.straggler()
        facts = (straggler.rank, straggler.slowdown, straggler.since) if straggler else (-1, 0.0, 0)
        others = (summary.total - summary.most) / max(summary.ranks - 1, 1)
        slowest_by = summary.most / others - 1 if others else 0.0
        self.verdict = Verdict(summary.slowest[0], slowest_by, *facts, self._comparisons.are_even())
        mean = summary.total / summary.ranks
        self.times = RankTimes(
            time=time.time(),
            first=max(summary.step - times.steps + 1, 1),
            last=summary.step,
            compute={"least": summary.least, "mean": mean, "most": summary.most},
            slowest=summary.slowest[0],
            slow={str(rank): slowdown for rank, slowdown in slow.items()},
        )
