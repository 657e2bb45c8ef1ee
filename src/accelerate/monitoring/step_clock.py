"""Timer of the phases of a training step, which runs in every step of every run.

It is an observer of each run: `pass_begun` to `after_step` are called at the events of loaders, backward
passes and optimizers. Collectives and saves call `wait_for_ranks` and `phase`. One phase is current at any
time, so the phases add up to the wall time; a phase inside another one is not part of the outer one.
`run_monitor.py` reads the closed windows, and `Accelerator.step_times` the times of the whole run.

A call takes no lock and waits for nothing. Calls from threads other than the training thread have no effect.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from accelerate.monitoring.device_clock import DeviceClock, TimedEvents
from accelerate.monitoring.records import PHASES

if TYPE_CHECKING:
    from torch import Tensor

DATA, MOVING, FORWARD, BACKWARD, COLLECTIVES, OPTIMIZER, SAVING, REST = range(len(PHASES))
_BEFORE = len(PHASES)
"""Phase before the first batch or backward pass, which belongs to no step."""
OTHER_THREAD = -1
"""Phase of a thread other than the training thread, which has none."""
_KEEPS_COLLECTIVES = (DATA, MOVING, SAVING)
"""Phases that include their collectives, such as sending batches and waiting for the saves of other ranks."""

INTERVAL = 1.0
"""Minimum length of a window, in seconds."""
MAX_WINDOWS = 2000
"""Approximate maximum number of windows of a run, which become longer during the run."""
NUM_KEPT_WINDOWS = 64


@dataclass(frozen=True)
class StepTimes:
    """Time of consecutive steps on this rank.

    Attributes:
        steps: Number of optimizer steps. Accumulated micro-batches belong to one step, and so do the steps of
            several optimizers.
        seconds: Wall time.
        seconds_by: Seconds of each phase, which add up to `seconds`: "data" (waiting for a batch), "moving"
            (of batches to the device), "forward" (from the batch to the backward pass, including the loss),
            "backward", "collectives" (waiting for other ranks, also at the end of the backward pass),
            "optimizer", "saving" and "rest".
        samples: Number of samples of the batches of prepared loaders, or 0 if batches have no size.
        waits: Seconds of "data" in which training waited. Passes without a step, such as an evaluation, are
            not included, and neither is the first batch of each pass, or of each worker, which has to start.
        evaluation: Seconds of passes over prepared loaders without a step.
        items: Number of items (such as tokens) that the loop has counted with `num_items`, over all ranks,
            or 0 if it counts none.
        step_flops: Model FLOPs of one optimizer step on this rank, or 0 if `count_flops` has counted none.
        peak_flops: Peak FLOPs per second of the device, or 0 if they are not known.
    """

    steps: int = 0
    seconds: float = 0.0
    seconds_by: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    samples: int = 0
    waits: float = 0.0
    evaluation: float = 0.0
    items: float = 0.0
    step_flops: float = 0.0
    peak_flops: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Part of the time that each phase takes, from 0 to 1."""
        return {
            name: seconds / self.seconds if self.seconds else 0.0 for name, seconds in self.seconds_by.items()
        }

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps per second, or 0 before the first one."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples per second on this rank, or 0 if batches have no size."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def items_per_second(self) -> float:
        """Items per second over all ranks, or 0 if the loop counts none."""
        return self.items / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs per second on this rank, or 0 if they are not counted."""
        return self.step_flops * self.steps_per_second

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization from 0 to 1, or None without counted FLOPs or the peak of the device."""
        flops = self.flops_per_second
        return flops / self.peak_flops if flops and self.peak_flops else None

    def __add__(self, other: StepTimes) -> StepTimes:
        return self._combine(other, 1)

    def __sub__(self, earlier: StepTimes) -> StepTimes:
        return self._combine(earlier, -1)

    def _combine(self, other: StepTimes, sign: int) -> StepTimes:
        return StepTimes(
            self.steps + sign * other.steps,
            self.seconds + sign * other.seconds,
            {name: seconds + sign * other.seconds_by[name] for name, seconds in self.seconds_by.items()},
            self.samples + sign * other.samples,
            self.waits + sign * other.waits,
            self.evaluation + sign * other.evaluation,
            self.items + sign * other.items,
            self.step_flops or other.step_flops,
            self.peak_flops or other.peak_flops,
        )


@dataclass(frozen=True)
class RunTimes(StepTimes):
    """Time of a run since its first step on this rank.

    Attributes:
        window: Times of the last window of steps, which has a second or more. It has no steps before the
            first window ends.
    """

    window: StepTimes = field(default_factory=StepTimes)

    def __str__(self) -> str:
        """Returns a table of the run and its last window."""
        columns = (self, self.window)
        rows = [("", "run", "last window"), ("steps", *(f"{times.steps}" for times in columns))]
        rows.append(("seconds", *(f"{times.seconds:.2f}" for times in columns)))
        rows += [
            (f"  {name}", *(f"{times.shares[name]:.1%}" for times in columns)) for name in self.seconds_by
        ]
        rows.append(("samples per second", *(f"{times.samples_per_second:.1f}" for times in columns)))
        return "\n".join(f"{name:<20}{run:>12}{window:>14}" for name, run, window in rows)


@dataclass(frozen=True)
class ClosedWindow:
    """Times of consecutive steps, with values of the last one."""

    time: float  # of the end, in seconds since the epoch
    last: int  # number of the last step, from 1, over all starts of a run
    times: StepTimes
    values: dict[str, Tensor]  # loss and gradient_norm of the last step, as they were passed
    recovery: dict[str, float] = field(default_factory=dict)  # as in `Window`


class Stepped(Protocol):
    """Protocol of an optimizer.

    Attributes:
        num_updates: Number of its updates, over all starts of a run.
    """

    num_updates: int


class StepClock:
    """Timer of the phases of each step, which is one object for the lifetime of the process."""

    def __init__(self) -> None:
        self.before_read, self.before_move = partial(self.switch, DATA), partial(self.switch, MOVING)
        self.before_backward, self.after_backward = partial(self.switch, BACKWARD), partial(self.switch, REST)
        self.before_step = partial(self.switch, OPTIMIZER)
        self.reset()

    def reset(self) -> None:
        """Clears all times, and makes the calling thread the training thread."""
        self.on_first_step: Callable[[], None] | None = None
        """Function that the training thread calls once, at the first step."""
        self.owner = get_ident()
        self.current = _BEFORE
        self.since = perf_counter()
        self.wanted = False
        """Whether this step keeps its values and ends a window."""
        self.samples = self.steps = 0
        self.num_skipped = 0
        """Number of steps of optimizers that were skipped or have failed."""
        self.items = 0.0
        """Number of items over all ranks."""
        self.step_flops = self.peak_flops = 0.0
        self.windows: deque[ClosedWindow] = deque(maxlen=NUM_KEPT_WINDOWS)
        self.kept: dict[str, Tensor] = {}
        self.recovery: dict[str, float] = {}
        self._device: DeviceClock | None = None
        self._seconds = [0.0] * (_BEFORE + 1)  # by phase in the open window
        self._closed = self._last_window = StepTimes()  # all closed windows, and the last one
        self._due = 0.0  # when the open window is long enough
        self._evaluation = 0.0  # in the open window
        self._no_wait = 0.0  # seconds of DATA in the open window that are no waits
        self._data_read = 0.0  # seconds of DATA until the last batch that was the first of a worker
        self._num_first_batches = 0  # batches of this pass that are still the first of a worker
        self._passes: dict[int, list[tuple[float, int, float]]] = {}
        """Time, steps and waits when passes began, by loader."""
        self._steps_before = 0  # of all starts of the run, besides `steps`
        self.restart_numbers()

    def loaded(self, updates: int) -> None:
        """Continues with the number of the optimizer that steps next."""
        self.restart_numbers()

    def restart_numbers(self) -> None:
        """Continues with the number of the optimizer that steps next, as after a load."""
        self._leader = 0  # id of the optimizer whose updates are counted as steps
        self._followers: set[int] = set()  # ids of other optimizers that have stepped since the leader
        self._stepping_alone = 0  # id of the leader while there are no followers

    def follow_device(self, events: TimedEvents | None) -> None:
        """Measures a device by its events from now on, or only the host if there are none."""
        self._device = None if events is None else DeviceClock(events)

    @property
    def number(self) -> int:
        """Number of the last step over all starts of the run."""
        return self._steps_before + self.steps

    @property
    def idle(self) -> float:
        """Part of the recent steps in which the device waited for the host, or 0 if that is not known."""
        return self._device.idle if self._device is not None else 0.0

    def switch(self, phase: int, *event: object) -> bool:
        """Begins a phase, and returns whether this is the training thread.

        Args:
            *event: Arguments of the event at which it begins, which have no effect.
        """
        if get_ident() != self.owner:
            return False
        now = perf_counter()
        self._seconds[self.current] += now - self.since
        self.since = now
        self.current = phase
        if self._device is not None:
            self._device.mark(phase, now)
        return True

    def resume(self, phase: int) -> None:
        """Continues the phase before a collective, which `wait_for_ranks` returned."""
        if phase != OTHER_THREAD:
            self.switch(phase)

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Returns a context in which a phase is current."""
        before = self.current
        is_switched = self.switch(phase)
        try:
            yield
        finally:
            if is_switched:
                self.switch(before)

    def pass_begun(self, loader: Any) -> None:
        """Begins a pass over a loader, in which the first batch of each worker is no wait."""
        if self.switch(DATA):
            self._num_first_batches = max(loader.num_workers, 1)
            self._data_read = self._seconds[DATA]
        self._passes.setdefault(id(loader), []).append((self.since, self.steps, self._waits))

    def batch_read(self, samples: int) -> None:
        """Begins the forward pass of a batch of so many samples."""
        if not self.switch(FORWARD):
            return
        self.samples += samples
        if self._device is not None:
            self._device.read()
        if self._num_first_batches:
            self._num_first_batches -= 1
            data = self._seconds[DATA]
            self._no_wait += data - self._data_read
            self._data_read = data

    @property
    def _waits(self) -> float:
        """Seconds of waiting for batches in the open window."""
        return self._seconds[DATA] - self._no_wait

    def pass_ended(self, loader: Iterable[Any]) -> None:
        """Ends a pass over a loader, which was an evaluation if no optimizer has stepped in it."""
        open_passes = self._passes.pop(id(loader), [])
        if not open_passes:  # it began before a reset
            return
        began_at, steps, waits = open_passes.pop()
        if open_passes:
            self._passes[id(loader)] = open_passes
        read_before = self._seconds[DATA]
        if not self.switch(REST):
            return
        self._no_wait += self._seconds[DATA] - read_before  # no batch was left
        if self.steps == steps:
            self._evaluation += self.since - began_at
            self._no_wait += self._waits - waits

    def wait_for_ranks(self) -> int:
        """Begins a collective, and returns the phase before for `resume`.

        A collective belongs to the current phase if that is data or saving.
        """
        before = self.current
        is_switched = self.switch(before if before in _KEEPS_COLLECTIVES else COLLECTIVES)
        return before if is_switched else OTHER_THREAD

    def end_gradients(self) -> None:
        """Ends the gradients of a backward pass, which waits for other ranks from now on.

        Any thread may call it, because the training thread waits in the backward pass.
        """
        if self.current != BACKWARD:
            return
        now = perf_counter()
        self._seconds[BACKWARD] += now - self.since
        self.since, self.current = now, COLLECTIVES
        if self._device is not None:
            self._device.mark(COLLECTIVES, now)

    def after_step(self, optimizer: Stepped, updates: int) -> None:
        """Ends the step of an optimizer.

        The thread that steps the leader becomes the training thread, whichever thread built the run.

        Args:
            updates: Number of updates of the parameters, which is 0 if the step was skipped or has failed.
        """
        is_owner = self.switch(REST)
        if not updates:
            self.num_skipped += 1
            return
        if id(optimizer) == self._stepping_alone and is_owner:
            self.steps += 1
        elif steps := self._count_steps(id(optimizer), optimizer.num_updates, is_owner=is_owner):
            self.steps += steps
        else:
            return
        if self._device is not None:
            self._device.read()
        if self.since >= self._due:
            self._end_window()

    def _accepts_thread(self, optimizer: int) -> bool:
        """Returns whether the steps of this thread count, which is not the training thread."""
        if not self._leader or optimizer == self._leader:
            return True
        return all(thread.ident != self.owner for thread in threading.enumerate())

    def _count_steps(self, optimizer: int, number: int, *, is_owner: bool) -> int:
        """Returns the number of steps that an update completes.

        An update by the leader is a step. Updates by other optimizers belong to the same step, until one of
        them has two in a row without the leader: then it is the new leader, and both are steps.
        """
        if not is_owner and not self._accepts_thread(optimizer):
            return 0
        if optimizer != self._leader and self._leader and optimizer not in self._followers:
            self._followers.add(optimizer)
            self._stepping_alone = 0
            return 0
        steps = 2 if self._leader not in (0, optimizer) else 1
        if not self._leader:
            self._steps_before = number - 1 - self.steps
        self._leader = self._stepping_alone = optimizer
        self._followers.clear()
        if not is_owner:
            self.owner = get_ident()
            self.switch(REST)
        if not self.steps:
            self._begin_run()
        return steps

    def _begin_run(self) -> None:
        self._due, self.wanted = self.since, True  # the first step is recorded at once, without values
        callback, self.on_first_step = self.on_first_step, None
        if callback is not None:
            callback()

    def add_recovery(self, part: str, seconds: float) -> None:
        """Adds seconds to a part of the current window, as in `Window.recovery`."""
        self.recovery[part] = self.recovery.get(part, 0.0) + seconds

    def keep(self, name: str, value: Tensor | None) -> None:
        """Keeps a value of this step for the window that ends, unless it is None."""
        if value is not None and get_ident() == self.owner:
            self.kept[name] = value

    def times(self) -> RunTimes:
        """Returns the times since the first step."""
        self._catch_up()
        now = self._read()
        return RunTimes(**vars(now), window=self._last_window)

    def end_run(self) -> None:
        """Ends the last window, which may be short."""
        if self.steps > self._closed.steps:
            self._catch_up()
            self.wanted = True
            self._end_window()

    def _catch_up(self) -> None:
        """Adds the time of the current phase until now, and the finished work of the device."""
        if self.switch(self.current) and self._device is not None:
            self._device.read()

    def _read(self) -> StepTimes:
        """Returns the times until the last switch."""
        seconds = self._seconds[:_BEFORE]
        if self._device is not None:
            seconds = divide_as(seconds, self._device.seconds)
        opened = StepTimes(
            self.steps - self._closed.steps,
            sum(seconds),
            dict(zip(PHASES, seconds, strict=True)),
            self.samples - self._closed.samples,
            self._waits,
            self._evaluation,
            self.items - self._closed.items,
            self.step_flops,
            self.peak_flops,
        )
        return self._closed + opened

    def _end_window(self) -> None:
        """Ends the window if this step has kept its values, and otherwise lets the next step keep them."""
        if not self.wanted:
            self.wanted = True
            return
        now = self._read()
        window, is_first = now - self._closed, not self._closed.steps
        self._closed, self._last_window = now, window
        self._seconds = [0.0] * len(self._seconds)
        self._no_wait = self._evaluation = self._data_read = 0.0
        if self._device is not None:
            self._device.clear()
            if is_first:
                self._device.forget_idle()  # the first steps warm up
        self.windows.append(ClosedWindow(time.time(), self.number, window, self.kept, self.recovery))
        self.kept, self.recovery = {}, {}
        interval = max(INTERVAL, now.seconds / MAX_WINDOWS)
        self._due = self.since + interval
        self.wanted = window.seconds >= interval * window.steps  # each step is a window


def divide_as(host: list[float], device: list[float]) -> list[float]:
    """Returns the time of the host divided into phases as on the device, except for saves."""
    on_device = [0.0 if phase == SAVING else device[phase] for phase in range(len(host))]
    if not (whole := sum(on_device)):
        return host
    factor = (sum(host) - host[SAVING]) / whole
    return [host[SAVING] if phase == SAVING else part * factor for phase, part in enumerate(on_device)]
