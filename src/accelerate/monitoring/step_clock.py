"""Where the time of a training step goes: a clock with one current phase, read by windows of steps.

The hooks of the package call `switch` where a phase begins, if the clock is `active`. The phases add up to
the wall time: one that begins inside another one is not part of that one. A call takes no lock and starts no
thread. Calls from other threads than the one that trains change nothing.
A device that computes asynchronously is asked by events what it did in each phase (`device_clock.py`).

Each step of several milliseconds is measured. Of shorter steps only some are, chosen at random, so that the
calls take a small part of the run; the time of the others is divided as that of the measured ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from random import Random
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol
from weakref import ref

from accelerate.monitoring.device_clock import DeviceClock, TimedEvents
from accelerate.monitoring.records import PHASES

DATA, MOVING, FORWARD, BACKWARD, COLLECTIVES, OPTIMIZER, SAVING, REST = range(len(PHASES))
_START = len(PHASES)
"""The phase before the first batch or backward pass, which is no part of any step."""
_UNMEASURED = _START + 1
"""The phase of steps that are not measured; only saves are."""
_FOREIGN = -1
"""What `switch` returns to another thread than the one that trains."""
_KEEPS_COLLECTIVES = (DATA, MOVING, SAVING)
"""Phases whose collectives belong to them: batches that rank 0 sends, ranks that wait for a save."""

INTERVAL = 1.0
"""Seconds of a window, at least."""
MOST_WINDOWS = 2000
"""Windows of a run, about: they become longer as it goes on."""
KEPT_WINDOWS = 64
COST = 13e-6
"""Seconds that the calls of a step take, about, where each step is measured."""
COST_OF_SAMPLE = 46e-6
"""Seconds that the calls of a measured step take among others that are not: this code is then in no cache."""
COST_OF_EVENTS = 100e-6
"""Seconds that the events of a measured step take on a device, about."""
KEPT_PART = 0.5
"""The part of the seconds that a window is too short for, as the device was behind, that the next one has."""
LARGEST_PART = 0.002
"""The part of the run that they may take."""
MEASURED_BATCHES = 24
"""Batches without a step, as in an evaluation, after which those of this pass are not measured if short."""
_FIRST_PLAN = 16
"""Steps after which it is first decided how many are measured."""
_STRAYS = 64
"""Steps of other optimizers in a row after which the steps are counted by another optimizer."""


@dataclass(frozen=True)
class StepTimes:
    """Where the time of consecutive steps went, on this rank.

    Attributes:
        steps: Number of optimizer steps. Accumulated rounds belong to the same step, and so do the steps of
            several optimizers.
        seconds: Wall time.
        seconds_by: The seconds of each phase, which add up to `seconds`: "data" (waiting for a batch),
            "moving" (of batches to the device), "forward" (from the batch to the backward pass, the loss
            included), "backward", "collectives" (waiting for other ranks, also at the end of the backward
            pass), "optimizer", "saving" and "rest".
        samples: Number of samples that prepared loaders have given; 0 where batches have no size.
    """

    steps: int = 0
    seconds: float = 0.0
    seconds_by: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    samples: int = 0

    @property
    def shares(self) -> dict[str, float]:
        """The part of the time that each phase takes, from 0 to 1."""
        return {
            name: seconds / self.seconds if self.seconds else 0.0 for name, seconds in self.seconds_by.items()
        }

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps per second; 0 before the first one."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples per second on this rank."""
        return self.samples / self.seconds if self.seconds else 0.0

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            self.steps + other.steps,
            self.seconds + other.seconds,
            {name: seconds + other.seconds_by[name] for name, seconds in self.seconds_by.items()},
            self.samples + other.samples,
        )

    def __sub__(self, earlier: StepTimes) -> StepTimes:
        return StepTimes(
            self.steps - earlier.steps,
            self.seconds - earlier.seconds,
            {name: seconds - earlier.seconds_by[name] for name, seconds in self.seconds_by.items()},
            self.samples - earlier.samples,
        )


@dataclass(frozen=True)
class RunTimes(StepTimes):
    """Where the time of a run went since its first step, on this rank.

    Attributes:
        window: The same for the last window of steps, of a second or more; no steps before its end.
    """

    window: StepTimes = field(default_factory=StepTimes)


@dataclass(frozen=True)
class ClosedWindow:
    """Consecutive steps."""

    time: float  # of the end, in seconds since the epoch
    last: int  # number of the last step, from 1, over all starts of a run
    times: StepTimes
    values: dict[str, Any]  # of the last step, as they were given: loss, gradient_norm


class Hook(Protocol):
    """What calls the clock from a hot path."""

    def set(self, is_measured: bool) -> None:
        """Call the clock from now on, or leave the path as it is without a clock."""


class StepClock:
    """Counts the seconds of each phase; a service of the process, which the hooks of the package call."""

    def __init__(self) -> None:
        self.on_first_step: Callable[[], None] | None = None
        """Called once, at the first step that is counted, in the thread that trains."""
        self._hooks: list[ref[Hook]] = []
        self._random = Random(0)
        self.reset()

    def reset(self) -> None:
        """Start again: the calling thread is the one that trains."""
        self.owner = get_ident()
        self.active = True  # whether this step is measured
        self.measured_from = 0  # number of updates of an optimizer from which it calls `begin_step`
        self.current = _START
        self.since = perf_counter()
        self.wanted = False  # this step keeps its values, and ends a window
        self.samples = 0
        self.steps = 0
        self.windows: deque[ClosedWindow] = deque(maxlen=KEPT_WINDOWS)
        self.kept: dict[str, Any] = {}
        self.on_first_step = None
        self._hooks.clear()
        self._device: DeviceClock | None = None
        self._due = 0.0  # when the window is long enough
        self._plan_at = _FIRST_PLAN
        self._interval = 1  # steps from one that is measured to the next, on average
        self._batches = 0  # since the last step
        self._totals = [0.0] * (_UNMEASURED + 1)  # since they were divided
        self._complete = [0.0] * _START  # of this window, before
        self._factor = 1.0  # by which they were multiplied last
        self._before = [0.0] * _START  # the same by the times of the host alone
        self._changes = [0.0] * _START  # of the totals, by what the device has taken
        self._opened = StepTimes()  # all windows before
        self._last_window = StepTimes()
        self.follow_anew()

    def follow_anew(self) -> None:
        """Count steps by the optimizer that steps next: the numbers of the updates have changed."""
        self._leader = 0
        self.number = 0  # of the last step that was counted, over all starts of a run
        self._strays, self._steps_of_strays = 0, 0
        self._measure()

    def follow_device(self, events: TimedEvents | None) -> None:
        """Measure a device by its events from now on; None: by the times of the host."""
        self._device = None if events is None else DeviceClock(events)

    @property
    def idle(self) -> float:
        """The part of the measured steps in which the device waited for kernels; 0 where nothing says so."""
        return self._device.idle if self._device is not None else 0.0

    def switch(self, phase: int) -> int:
        """Begin a phase; return the one before, for `resume`."""
        if get_ident() != self.owner:
            return _FOREIGN
        now = perf_counter()
        before = self.current
        self._totals[before] += now - self.since
        self.since = now
        self.current = phase
        if self._device is not None:
            self._device.switch(phase, now)
        return before

    def resume(self, phase: int) -> None:
        """Go on with a phase that `switch` returned."""
        if phase != _FOREIGN:
            now = perf_counter()
            self._totals[self.current] += now - self.since
            self.since = now
            self.current = phase
            if self._device is not None:
                self._device.switch(phase, now)

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Return a context that is a phase, also in steps that are not measured."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.resume(before)

    def begin_pass(self) -> None:
        """Begin to read batches; what reads them is measured at first."""
        if self.switch(DATA) != _FOREIGN:
            self._divide()
            self._batches = 0
            self._measure()

    def end_pass(self, samples: int) -> None:
        """End to read batches, of which so many samples were not counted yet."""
        if get_ident() != self.owner:
            return
        self.samples += samples
        if self.active:
            self.switch(REST)
        elif not self.measured_from:  # by `_leave_out_batches`
            self.switch(REST)
            self._divide()
            self._measure()

    def begin_forward(self, samples: int) -> None:
        """Begin the forward pass of a batch; so many samples were read since the last call."""
        if self.switch(FORWARD) == _FOREIGN:
            return
        self.samples += samples
        self._batches += 1
        if self._device is not None:
            self._read_device(self._device)
        if self._batches == MEASURED_BATCHES:
            self._leave_out_batches()

    def wait_for_ranks(self) -> int:
        """Begin a collective; it belongs to the phase around it where that is data or saving."""
        phase = self.current
        return self.switch(COLLECTIVES if self.active and phase not in _KEEPS_COLLECTIVES else phase)

    def end_gradients(self) -> float:
        """Note that a backward pass has computed its gradients; return the time, for `end_backward`.

        Any thread may call this: the one that trains waits in the backward pass.
        """
        now = perf_counter()
        if self._device is not None:
            self._device.switch(COLLECTIVES, now)
        return now

    def end_backward(self, before: int, gradients_at: float) -> None:
        """End a backward pass whose gradients were computed at a time: from there on it waited for ranks."""
        if before == _FOREIGN:
            return
        now = perf_counter()
        computed = min(max(gradients_at, self.since), now) if gradients_at else now
        self._totals[self.current] += computed - self.since
        self._totals[COLLECTIVES] += now - computed
        self.since = now
        self.current = before if before == OPTIMIZER else REST  # a closure runs inside of a step
        if self._device is not None:
            self._device.switch(self.current, now)

    def begin_step(self, optimizer: int) -> int:
        """Begin the phase of an optimizer; what is returned is for `end_step`."""
        if self.active:
            return self.switch(OPTIMIZER)
        is_due = optimizer == self._leader or not self.measured_from
        return self.switch(_UNMEASURED) if is_due else _FOREIGN

    def end_step(self, before: int, optimizer: int, updates: int, number: int) -> None:
        """End the phase of an optimizer, which has made so many updates now, and `number` in all.

        `optimizer` identifies it.
        """
        if before == _FOREIGN:
            return
        self.resume(REST)
        if before == _UNMEASURED:  # the next step is measured
            self._measure()
        if not updates or (optimizer != self._leader and not self._leads(optimizer, number)):
            return
        self.steps += number - self.number
        self.number = number
        self._batches = 0
        if before == _UNMEASURED:
            return
        if self._device is not None:
            self._device.end_span()
            self._read_device(self._device)
        if self.since >= self._due:
            self._end_window()
        if self.steps >= self._plan_at:
            self._plan()
        if self._interval > 1 and not self.wanted:
            self._leave_out(number + self._random.randrange(2 * self._interval - 2))

    def end_run(self) -> None:
        """End the last window, which may be short; called by the thread that trains."""
        if get_ident() == self.owner and self.steps > self._opened.steps:
            self._read_now()
            self.wanted = True
            self._end_window()

    def times(self, updates: Mapping[int, int] | None = None) -> RunTimes:
        """Return the times since the first step; called by the thread that trains.

        `updates` are the numbers of updates of optimizers: not each step is counted at once.
        """
        self._read_now()
        number = (updates or {}).get(self._leader, self.number)
        self.steps, self.number = self.steps + number - self.number, number
        now = self._read()
        return RunTimes(now.steps, now.seconds, now.seconds_by, now.samples, self._last_window)

    def keep(self, name: str, value: Any) -> None:
        """Keep a value of this step with the window that ends; None is left out."""
        if value is not None and get_ident() == self.owner:
            self.kept[name] = value

    def add_hook(self, hook: Hook) -> None:
        """Set a hook on a hot path, while steps are measured only, as long as the hook is used."""
        self._hooks = [known for known in self._hooks if known() is not None]
        self._hooks.append(ref(hook))
        hook.set(self.active)

    def _set_hooks(self, is_measured: bool) -> None:
        for known in self._hooks:
            if (hook := known()) is not None:
                hook.set(is_measured)

    def _measure(self) -> None:
        """Measure from now on."""
        self.measured_from = 0
        if not self.active:
            self.active = True
            self._set_hooks(True)

    def _leave_out(self, measured_from: int) -> None:
        """Measure nothing until the leading optimizer has made so many updates; 0: until the next step."""
        self.active, self.measured_from = False, measured_from
        self.switch(_UNMEASURED)
        self._set_hooks(False)

    def _leave_out_batches(self) -> None:
        """Measure no further batches of this pass, in which no optimizer steps, if they are short."""
        seconds = self._totals[DATA] + self._totals[FORWARD] + self._totals[REST]
        if LARGEST_PART * seconds < self._cost(COST) * MEASURED_BATCHES:
            self._leave_out(0)

    def _divided(self) -> list[float]:
        """Seconds by phase in this window; unmeasured ones are divided as those measured beside them."""
        return self._with_unmeasured(self._complete, self._known())

    def _with_unmeasured(self, before: list[float], totals: list[float]) -> list[float]:
        factor = self._whole_by_measured(totals)
        return [
            earlier + (total if phase == SAVING else total * factor)
            for phase, (earlier, total) in enumerate(zip(before, totals, strict=True))
        ]

    def _known(self) -> list[float]:
        """Measured seconds by phase: of the device, where it was read, and else of the host."""
        totals = self._totals[:_START]
        if self._device is None:
            return totals
        rows = zip(totals, self._changes, self._device.unread, strict=True)
        return [max(total + change - unread, 0.0) for total, change, unread in rows]

    def _whole_by_measured(self, totals: list[float]) -> float:
        """By what the seconds of measured steps are multiplied, for those that are not."""
        measured = sum(totals) - totals[SAVING]
        return 1 + self._totals[_UNMEASURED] / measured if measured else 1.0

    def _shown(self) -> list[float]:
        """Seconds by phase in this window, which add up to the time of the host."""
        divided = self._divided()
        if self._device is None:
            return divided
        host = self._on_host()
        return scale_to(divided if sum(divided) > divided[SAVING] else host, sum(host))

    def _on_host(self) -> list[float]:
        return self._with_unmeasured(self._before, self._totals[:_START])

    def _divide(self) -> None:
        self._begin_division(self._divided())

    def _begin_division(self, complete: list[float]) -> None:
        """Divide the unmeasured seconds from now on like the steps that are measured from now on."""
        self._factor = self._whole_by_measured(self._known())
        self._before = self._on_host()
        self._complete, self._totals = complete, [0.0] * len(self._totals)
        self._changes = [0.0] * len(self._changes)
        if self._device is not None:
            self._device.begin_division()

    def _cost(self, of_calls: float) -> float:
        """Seconds that measuring a step takes, about."""
        return of_calls if self._device is None else of_calls + COST_OF_EVENTS

    def _read_now(self) -> None:
        """Count up to now, and what the device has done."""
        self.switch(self.current)
        if self._device is not None and get_ident() == self.owner:
            self._device.end_span()
            self._read_device(self._device)

    def _read_device(self, device: DeviceClock) -> None:
        """Replace the seconds of the host by those of the device, also of steps before this division."""
        for reading in device.read(self.since):
            for phase, seconds in enumerate(reading.device):
                if reading.division == device.division:
                    self._changes[phase] += seconds - reading.host[phase]
                else:
                    self._complete[phase] += seconds * self._factor

    def _read(self) -> StepTimes:
        """The times up to the last call."""
        pairs = zip(PHASES, self._shown(), strict=True)
        seconds_by = {name: self._opened.seconds_by[name] + part for name, part in pairs}
        return StepTimes(self.steps, sum(seconds_by.values()), seconds_by, self.samples)

    def _leads(self, optimizer: int, number: int) -> bool:
        """Whether steps are counted by an optimizer from now on: the first one, unless it steps no more."""
        if self.steps != self._steps_of_strays:
            self._strays, self._steps_of_strays = 0, self.steps
        self._strays += 1
        if self._leader and self._strays <= _STRAYS:
            return False
        self._due = self._due or self.since + INTERVAL
        self._leader, self.number, self._strays = optimizer, number - 1, 0
        callback, self.on_first_step = self.on_first_step, None
        if callback is not None:
            callback()
        return True

    def _plan(self) -> None:
        """Decide how many steps are measured, from the time that they take."""
        self._plan_at = 2 * self.steps
        seconds = sum(self._shown())
        steps = self.steps - self._opened.steps
        allowed = LARGEST_PART * seconds / steps
        is_long = allowed >= self._cost(COST)
        self._interval = 1 if is_long else ceil(self._cost(COST_OF_SAMPLE) / max(allowed, 1e-9))

    def _end_window(self) -> None:
        """End the window, if the values of this step were kept; otherwise let the next step keep them."""
        if not self.wanted:
            self.wanted = True
            return
        self._plan()
        if self._device is not None and not self._opened.steps:
            self._device.forget_idle()  # the first steps warm up
        now = self._read()
        window, self._opened = now - self._opened, now
        pairs = zip(self._divided(), self._shown(), strict=True)
        self._begin_division([KEPT_PART * (known - shown) for known, shown in pairs])
        self._before = [0.0] * _START
        self._last_window = window
        self.windows.append(ClosedWindow(time.time(), self.number, window, self.kept))
        self.kept = {}
        interval = max(INTERVAL, now.seconds / MOST_WINDOWS)
        self._due = self.since + interval
        self.wanted = window.seconds >= interval * window.steps  # each step is a window


def scale_to(seconds: list[float], whole: float) -> list[float]:
    """Return the seconds of phases, scaled except for saves, none below 0, so that they add up to `whole`."""
    parts = [max(part, 0.0) for part in seconds]
    parts[SAVING] = 0.0
    scale = (whole - seconds[SAVING]) / (sum(parts) or 1.0)
    parts = [part * scale for part in parts]
    parts[SAVING] = seconds[SAVING]
    return parts
