"""Goodput of a run, the part of its wall time in which it took steps that were not lost.

The wall time of all attempts is divided into parts, from the records of the first rank and of the launcher.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from accelerate.monitoring import Attempt, Checkpoint, Start, Window

STEPS, LOST = "steps", "lost steps"
PARTS = (STEPS, LOST, "startup", "restore", "data", "members", "save", "stopping", "other")
"""Parts of the wall time. "stopping" is the time from a failure until the processes have
ended, and "members" the time in which a replica group waited for the members of a step."""
Span: TypeAlias = tuple[float, float, Attempt | None]
"""Begin, end and record of an attempt, which is None if the launcher has written none."""
MAX_CAUSES = 5
"""Most causes of lost steps in the text."""
COLUMNS = 8
NOT_COMMITTED = "replica groups ended during a step"
"""Cause of steps that were lost without the end of an attempt."""


class Steps(NamedTuple):
    """Steps of a window, with the parts of its seconds."""

    end: float  # seconds since the epoch
    seconds: float
    data: float  # without the seconds of `members`
    save: float
    members: float
    not_committed: float
    first: int
    last: int


@dataclass
class Goodput:
    """Division of the wall time of a run.

    Attributes:
        seconds_by: Seconds of each part, which add up to the wall time.
        failures: Attempts that failed, in the order of time.
        lost_by_cause: How an attempt ended -> seconds of its steps that were lost.
        save_interval: Seconds between two saves with which the measured failures cost least, or None without
            a failure or a save (Young, 1974: the square root of twice the time of a save and the mean time
            between failures).
    """

    seconds_by: dict[str, float]
    failures: list[Attempt]
    lost_by_cause: dict[str, float]
    save_interval: float | None

    @property
    def wall(self) -> float:
        """Wall time in seconds."""
        return sum(self.seconds_by.values())

    @property
    def fraction(self) -> float:
        """Part of the wall time in steps that were not lost, from 0 to 1."""
        return self.seconds_by[STEPS] / self.wall if self.wall else 0.0

    def lines(self) -> list[str]:
        """Returns the figures as text."""
        parts = sorted(self.seconds_by.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {seconds / self.wall:.1%}" for name, seconds in parts if seconds > 0)
        lines = [f"goodput {self.fraction:.1%} of {self.wall:.1f} s: {shares}"]
        causes = sorted(self.lost_by_cause.items(), key=lambda cause: -cause[1])[:MAX_CAUSES]
        lines += [f"{seconds:.1f} s of steps lost: {cause}" for cause, seconds in causes]
        if self.save_interval is not None:
            count = len(self.failures)
            failures = "1 failure suggests" if count == 1 else f"{count} failures suggest"
            lines.append(f"{failures} a save every {self.save_interval:.0f} s")
        return lines


@dataclass
class Timeline:
    """Windows, checkpoints, starts and attempts of the first rank, in the order of its records."""

    starts: list[float] = field(default_factory=list)
    windows: array[float] = field(default_factory=lambda: array("d"))
    restores: list[tuple[float, float]] = field(default_factory=list)  # end and seconds
    saves: list[float] = field(default_factory=list)  # seconds for which training waited
    attempts: list[Attempt] = field(default_factory=list)

    def add_start(self, record: Start) -> None:
        self.starts.append(record.time)

    def add_window(
        self, record: Window, seconds_by: Mapping[str, float], recovery: Mapping[str, float]
    ) -> None:
        members = min(recovery.get("members", 0.0), seconds_by.get("data", 0.0))
        data, save = seconds_by.get("data", 0.0) - members, seconds_by.get("saving", 0.0)
        not_committed = min(recovery.get("lost", 0.0), record.seconds - data - members - save)
        parts = (data, save, members, max(not_committed, 0.0))
        self.windows.extend((record.time, record.seconds, *parts, record.first, record.last))

    def add_checkpoint(self, record: Checkpoint) -> None:
        if record.event == "loaded":
            self.restores.append((record.time, record.seconds))
        elif record.event == "committed":
            self.saves.append(record.blocked)

    def merged_attempts(self) -> list[Attempt]:
        """Returns the attempts in the order of time.

        The launcher of each machine records an attempt. Of records at the same time, the one with the cause
        of the failure counts.
        """
        merged: list[Attempt] = []
        for record in sorted(self.attempts, key=lambda record: record.began):
            if not merged or record.began > (merged[-1].began + merged[-1].time) / 2:
                merged.append(record)
            elif (record.is_cause, record.rank) > (merged[-1].is_cause, merged[-1].rank):
                merged[-1] = record
        return merged

    def steps(self) -> Iterator[Steps]:
        for index in range(0, len(self.windows), COLUMNS):
            end, seconds, data, save, members, lost, first, last = self.windows[index : index + COLUMNS]
            yield Steps(end, seconds, data, save, members, lost, int(first), int(last))

    def spans(self, last_time: float) -> list[Span]:
        """Returns the attempts in the order of time."""
        recorded = self.merged_attempts()
        begins = [
            start for start in self.starts if not any(each.began <= start <= each.time for each in recorded)
        ]
        bounds = sorted([*begins, *(attempt.began for attempt in recorded)])
        spans: list[Span] = [(each.began, each.time, each) for each in recorded]
        for begin in begins:
            next_begin = min([bound for bound in bounds if bound > begin], default=math.inf)
            ends = [step.end for step in self.steps() if begin < step.end <= next_begin]
            spans.append((begin, max(ends, default=begin) if next_begin < math.inf else last_time, None))
        return sorted(spans, key=lambda span: span[0])


def measure_goodput(timeline: Timeline, last_time: float) -> Goodput | None:
    """Returns the goodput of a run, or None without a start.

    Args:
        timeline: Records of the first rank.
        last_time: Time of the last record of all ranks.
    """
    spans = timeline.spans(last_time)
    if not spans:
        return None
    by_span = _by_span(spans, list(timeline.steps()))
    resumed = math.inf  # number of steps with which the next attempt begins
    seconds_by, lost_by_cause = dict.fromkeys(PARTS, 0.0), dict[str, float]()
    for span, steps in reversed(list(zip(spans, by_span, strict=True))):
        begin, end, attempt = span
        first = steps[0].end - steps[0].seconds if steps else end  # a later load is part of a step
        restore = sum(seconds for time, seconds in timeline.restores if begin < time <= first)
        parts = _divide(span, steps, restore, resumed)
        for name, seconds in parts.items():
            seconds_by[name] += seconds
        not_committed = sum(window.not_committed for window in steps)
        causes = {NOT_COMMITTED: not_committed}
        if attempt is not None:
            causes[attempt.text] = parts[LOST] - not_committed
        for cause, seconds in causes.items():
            if seconds > 0:
                lost_by_cause[cause] = lost_by_cause.get(cause, 0.0) + seconds
        if steps:
            resumed = min(resumed, steps[0].first - 1)
    failures = [attempt for _, _, attempt in spans if attempt is not None and attempt.rank >= 0]
    interval = None
    if failures and timeline.saves:
        wall, save = sum(seconds_by.values()), sum(timeline.saves) / len(timeline.saves)
        seconds = math.sqrt(2 * save * wall / len(failures))
        interval = seconds if seconds >= 1 else None  # saves in the background block for milliseconds
    return Goodput(seconds_by, failures, lost_by_cause, interval)


def _by_span(spans: list[Span], steps: list[Steps]) -> list[list[Steps]]:
    """Returns the windows of each attempt."""
    by_span: list[list[Steps]] = [[] for _ in spans]
    ends = [end for _, end, _ in spans]
    for window in sorted(steps):
        index = next((index for index, end in enumerate(ends) if window.end <= end), len(ends) - 1)
        by_span[index].append(window)
    return by_span


def _divide(span: Span, steps: list[Steps], restore: float, resumed: float) -> dict[str, float]:
    """Returns the seconds of each part of an attempt.

    Args:
        restore: Seconds in which it loaded checkpoints.
        resumed: Number of steps with which the next attempt begins, after which steps are lost.
    """
    begin, end, attempt = span
    parts = {**dict.fromkeys(PARTS, 0.0), "restore": restore}
    first = steps[0].end - steps[0].seconds if steps else end
    has_failed = attempt is not None and attempt.rank >= 0
    failed = attempt.failed if attempt is not None and has_failed and attempt.failed > begin else end
    parts["stopping"] = end - min(failed, end)
    parts["startup"] = max(min(first, failed) - begin - restore, 0.0)
    for window in steps:
        count = max(window.last - window.first + 1, 1)
        lost = min(max(window.last - max(resumed, window.first - 1), 0), count) / count
        own = window.seconds - window.data - window.save - window.members - window.not_committed
        parts[LOST] += own * lost + window.not_committed
        parts[STEPS] += own * (1 - lost)
        parts["data"] += window.data
        parts["members"] += window.members
        parts["save"] += window.save
    if has_failed and steps:  # the last steps of a process that was killed are in no window
        unrecorded = max(failed - steps[-1].end, 0.0)
        kept = 0.0
        if resumed < math.inf:  # a checkpoint may have some of them
            seconds = sum(window.seconds for window in steps) / max(steps[-1].last - steps[0].first + 1, 1)
            kept = min(max(resumed - steps[-1].last, 0) * seconds, unrecorded)
        parts[LOST] += unrecorded - kept
        parts[STEPS] += kept
    parts["other"] = max(end - begin - sum(parts.values()), 0.0)
    return parts
