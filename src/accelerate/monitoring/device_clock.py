"""How long a device computes in each phase of a step: events in its stream, read when they are done.

A device that computes asynchronously begins a phase later than the host. An event at each switch of the phase
says when. The times between neighboring events take the place of the host's times. Nothing waits for an
event: those that are not done are read later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, Protocol

from accelerate.monitoring.records import PHASES

FORWARD, BACKWARD, OPTIMIZER, SAVING = (
    PHASES.index(name) for name in ("forward", "backward", "optimizer", "saving")
)
MOST_EVENTS = 512
"""Events of the pool. Steps for which there are none keep the times of the host."""
MOST_MARKS = 32
"""Switches after which a span ends that no step has ended."""
SHORT_LAG, SMALL_PART = 200e-6, 0.05
"""A device that is so many seconds, or this part of a phase, behind the host at its end waits for kernels."""
MOST_SPANS = 200
"""Spans after which the earlier ones count half as much for the idle part."""


class TimedEvents(Protocol):
    """Events with times of one device."""

    def make(self) -> Any:
        """Make an event, whose method `query` says whether it is done; None where the device has none."""

    def record(self, event: Any) -> None:
        """Record an event in the current stream."""

    def seconds_between(self, first: Any, last: Any) -> float | None:
        """Return the seconds between two events that are done; None where the device has no such times."""

    def is_capturing(self) -> bool:
        """Whether the current stream captures a graph: its events are not to be asked then."""


@dataclass
class Mark:
    """The begin of a phase."""

    event: Any
    phase: int
    time: float  # of the host
    is_last: bool = False  # no later span begins with it
    seen: float = inf  # time of the host at which the event was done, at the latest


@dataclass
class Span:
    """Consecutive phases, of which all were marked."""

    marks: list[Mark]
    division: int


@dataclass(frozen=True)
class Reading:
    """The seconds of each phase of a span on the host and on the device. Saves are not part of them."""

    division: int
    host: list[float]
    device: list[float]


class DeviceClock:
    """Marks the phases in the stream of a device, and reads the marks late."""

    def __init__(self, events: TimedEvents) -> None:
        self._events = events
        self._num_events = 0
        self._free: list[Any] = []
        self._open: list[Mark] = []
        self._unseen: deque[Mark] = deque()
        self._closed: deque[Span] = deque()
        self._is_supported = True
        self.division = 0  # of the clock: spans do not go beyond one
        self.unread = [0.0] * len(PHASES)  # seconds of the host in spans of this division that are not read
        self.forget_idle()

    def forget_idle(self) -> None:
        """Measure the idle part from now on."""
        self._idle = self._seconds = 0.0
        self._num_spans = 0

    @property
    def idle(self) -> float:
        """The part of the steps, from 0 to 1, in which the device waited for the host to launch kernels."""
        return self._idle / self._seconds if self._seconds else 0.0

    def switch(self, phase: int, now: float) -> None:
        """Mark the begin of a phase; one that is none of a step ends the span."""
        is_phase = phase < len(PHASES)
        if not self._is_supported or (not self._open and (not is_phase or phase == SAVING)):
            return
        if self._events.is_capturing():
            self._abandon()
            return
        self._look(now)
        event = self._take()
        if event is None:
            self._abandon()
            return
        self._events.record(event)
        mark = Mark(event, phase, now, is_last=not is_phase)
        if self._open:
            self._count(self._open[-1], now - self._open[-1].time)
        self._open.append(mark)
        self._unseen.append(mark)
        if mark.is_last or len(self._open) >= MOST_MARKS:
            self.end_span()

    def end_span(self) -> None:
        """End the span with its last mark, which begins the next one."""
        if len(self._open) > 1:
            last = self._open[-1]
            self._closed.append(Span(self._open, self.division))
            self._open = [] if last.is_last else [last]

    def begin_division(self) -> None:
        """Begin another division of the clock with the last mark."""
        self.end_span()
        self.division += 1
        self.unread = [0.0] * len(PHASES)

    def read(self, now: float) -> Iterator[Reading]:
        """Return the readings of the spans whose events are done by now."""
        if self._closed and not self._events.is_capturing():
            self._look(now)
        while self._closed and self._closed[0].marks[-1].seen < inf:
            span = self._closed.popleft()
            seconds = self._read_span(span.marks)
            self._free.extend(mark.event for mark in span.marks if mark.is_last or mark is not span.marks[-1])
            if seconds is None:
                self._give_up()
                return
            if span.division == self.division:
                for first, last in pairwise(span.marks):
                    self._count(first, first.time - last.time)
            self._note_idle(span.marks, seconds)
            yield sum_up(span, seconds)

    def _count(self, mark: Mark, seconds: float) -> None:
        if mark.phase != SAVING:
            self.unread[mark.phase] += seconds

    def _give_up(self) -> None:
        """Keep the times of the host from now on: the device measures none."""
        self._is_supported = False
        self._open, self.unread = [], [0.0] * len(PHASES)
        self._closed.clear()
        self._unseen.clear()

    def _look(self, now: float) -> None:
        """Note which events are done."""
        while self._unseen and self._unseen[0].event.query():
            self._unseen.popleft().seen = now

    def _take(self) -> Any:
        """Return an event that is free; None where all are used."""
        if self._free:
            return self._free.pop()
        if self._num_events == MOST_EVENTS:
            return None
        self._num_events += 1
        event = self._events.make()
        if event is None:
            self._give_up()
        return event

    def _abandon(self) -> None:
        """Give the open span up."""
        if not self._open:
            return
        for mark, following in pairwise(self._open):
            self._count(mark, mark.time - following.time)
        first, *others = self._open
        self._open = []
        is_shared = bool(self._closed) and self._closed[-1].marks[-1] is first
        first.is_last = True
        given_up = others if is_shared else [first, *others]
        self._free.extend(mark.event for mark in given_up)
        self._unseen = deque(mark for mark in self._unseen if all(mark is not other for other in given_up))

    def _read_span(self, marks: Sequence[Mark]) -> list[float] | None:
        """Return the seconds of each phase of a span on the device; None where it measures none."""
        read = [self._events.seconds_between(first.event, last.event) for first, last in pairwise(marks)]
        seconds = [max(part, 0.0) for part in read if part is not None]
        return seconds if len(seconds) == len(read) else None

    def _note_idle(self, marks: Sequence[Mark], seconds: Sequence[float]) -> None:
        if all(mark.phase != BACKWARD for mark in marks[:-1]):
            return  # no step
        self._num_spans += 1
        if self._num_spans == MOST_SPANS:
            self._num_spans, self._idle, self._seconds = 0, self._idle / 2, self._seconds / 2
        self._seconds += marks[-1].time - marks[0].time
        self._idle += find_idle(marks, seconds)


def sum_up(span: Span, seconds: Sequence[float]) -> Reading:
    """Return the seconds of each phase of a span."""
    reading = Reading(span.division, [0.0] * len(PHASES), [0.0] * len(PHASES))
    for (first, last), on_device in zip(pairwise(span.marks), seconds, strict=True):
        if first.phase != SAVING:
            reading.host[first.phase] += last.time - first.time
            reading.device[first.phase] += on_device
    return reading


def find_idle(marks: Sequence[Mark], seconds: Sequence[float]) -> float:
    """Return the seconds of a span in which the device waited for kernels, at least.

    The device is behind the host by no more than what shows that an event was done. It is idle in a phase at
    whose end it is not behind. As the host may have waited for it inside of a phase, which looks the same,
    this counts only if no backward pass ends with a device that is behind: the host does not wait in these.
    """
    begins, behind = marks[0].time, []
    on_device = 0.0
    for mark, part in zip(marks, (*seconds, 0.0), strict=True):
        behind.append((on_device, mark.seen - begins - on_device))
        on_device += part
    first_lag = min(lag for _, lag in behind)
    lags = [
        max(first_lag + at - (mark.time - begins), 0.0) for mark, (at, _) in zip(marks, behind, strict=True)
    ]
    idle = 0.0
    for index, mark in enumerate(marks[:-1]):
        on_host = marks[index + 1].time - mark.time
        if lags[index + 1] > max(SHORT_LAG, SMALL_PART * on_host):
            if mark.phase == BACKWARD:
                return 0.0
        elif mark.phase in (FORWARD, BACKWARD, OPTIMIZER):
            idle += max(seconds[index] - lags[index], 0.0)
    return min(idle, marks[-1].time - begins)
