"""Seconds of each phase on a device that computes asynchronously, measured by events in its stream.

`step_clock.py` records an event at each switch of the phase, and reads the events of finished work at each
step. The host never waits for an event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate.monitoring.records import PHASES

BACKWARD = PHASES.index("backward")
MAX_EVENTS = 512
"""Maximum number of events. A phase that finds all events in use is not measured."""
SHORT_LAG, SMALL_PART = 200e-6, 0.05
"""Seconds, or part of a backward pass, by which its equal times on host and device may differ."""
NUM_RECENT_STEPS = 200
"""Number of backward passes from which `idle` is computed."""


class TimedEvents(Protocol):
    """Factory of the timing events of one device."""

    def make(self) -> Any:
        """Returns an event with a method `query`, or None if the device has no events."""

    def record(self, event: Any) -> None:
        """Records an event in the current stream."""

    def seconds_between(self, first: Any, last: Any) -> float | None:
        """Returns the seconds between two finished events, or None if the device measures no times."""

    def is_capturing(self) -> bool:
        """Returns whether the current stream captures a graph, which allows no queries."""


@dataclass(slots=True)
class Mark:
    """Beginning of a phase on host and device."""

    event: Any
    phase: int
    time: float  # on the host
    is_early: bool = False  # the device had reached the event when the host began one of the next two phases


class DeviceClock:
    """Timer of the phases on a device."""

    def __init__(self, events: TimedEvents) -> None:
        self.seconds = [0.0] * (len(PHASES) + 1)
        """Seconds of each phase that were read since the last `clear`."""
        self._events = events
        self._marks: deque[Mark | None] = deque()  # in stream order, with None where marks are missing
        self._free: list[Any] = []
        self._num_events = 0
        self._is_supported = True
        self._has_gap = False
        self._watched: Mark | None = None  # end of the last backward pass
        self._num_looks = 0
        self._is_host_bound: deque[bool] = deque(maxlen=NUM_RECENT_STEPS)

    @property
    def idle(self) -> float:
        """Part of the recent backward passes, from 0 to 1, in which the device waited for the host."""
        return sum(self._is_host_bound) / len(self._is_host_bound) if self._is_host_bound else 0.0

    def clear(self) -> None:
        """Sets the seconds of all phases to 0."""
        self.seconds = [0.0] * len(self.seconds)

    def forget_idle(self) -> None:
        """Forgets the backward passes so far."""
        self._is_host_bound.clear()

    def mark(self, phase: int, now: float) -> None:
        """Records an event at the beginning of a phase."""
        if not self._is_supported:
            return
        if self._events.is_capturing() or (event := self._take_event()) is None:
            self._has_gap = True
            return
        self._look_at_backward()
        if self._has_gap:
            self._marks.append(None)
            self._has_gap = False
        self._events.record(event)
        mark = Mark(event, phase, now)
        last = self._marks[-1] if self._marks else None
        if last is not None and last.phase == BACKWARD:
            self._watched, self._num_looks = mark, 0
        self._marks.append(mark)

    def read(self) -> None:
        """Adds the seconds of all phases that the device has finished."""
        if not self._is_supported or self._events.is_capturing():
            return
        marks = self._marks
        while len(marks) > 1:
            first, last = marks[0], marks[1]
            if first is not None and last is not None:
                if not last.event.query():
                    return
                seconds = self._events.seconds_between(first.event, last.event)
                if seconds is None:
                    self._give_up()
                    return
                self.seconds[first.phase] += max(seconds, 0.0)
                if first.phase == BACKWARD:
                    # The host waits for nothing in a backward pass. So the device waits for kernels if it
                    # takes as long as the host to launch them, and is not behind at the end.
                    on_host = last.time - first.time
                    is_equal = abs(seconds - on_host) <= max(SHORT_LAG, SMALL_PART * on_host)
                    self._is_host_bound.append(last.is_early and is_equal)
            elif first is not None and not first.event.query():
                return
            marks.popleft()
            if first is not None:
                self._free.append(first.event)

    def _take_event(self) -> Any:
        """Returns an unused event, or None."""
        if self._free:
            return self._free.pop()
        if self._num_events == MAX_EVENTS:
            return None
        self._num_events += 1
        event = self._events.make()
        if event is None:
            self._give_up()
        return event

    def _give_up(self) -> None:
        """Measures nothing from now on, because the device does not support it."""
        self._is_supported = False
        self._marks.clear()
        self.clear()

    def _look_at_backward(self) -> None:
        """Looks whether the device has finished the last backward pass, at the next two marks."""
        if self._watched is not None:
            self._watched.is_early = self._watched.event.query()
            self._num_looks += 1
            if self._watched.is_early or self._num_looks == 2:
                self._watched = None
