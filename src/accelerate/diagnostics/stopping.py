"""Requests to stop and to save, on which all ranks act at the same step.

`Accelerator.should_stop` and `should_save` read them. Requests come from signals, time limits, files and Ray
Train. The first read of either property in a step counts the step. Every N steps the ranks begin to reduce
their requests, and the next step waits for the result, so the all-reduce overlaps with a step. N depends on
the times of a step and of an all-reduce, which are reduced as well.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from accelerate.base import read_seconds, wrong_value
from accelerate.launch import NOTES, SCRIPT
from accelerate.logging import get_logger
from accelerate.ops import AsyncReduction, flight_recorder, reduce_async
from accelerate.settings import decode
from accelerate.settings.sections import StoppingSection
from accelerate.state import PartialState, record_event, services

logger = get_logger(__name__)

DEFAULT_MARGIN = 120
"""Default of `stop_margin`, the seconds before the end of a SLURM allocation at which a run stops."""
MIN_READ_INTERVAL = 1.0
"""Seconds between two reads of a file, because a shared file system may be slow."""
MAX_OVERHEAD = 0.001
"""Fraction of the time of the training thread that the all-reduces may take."""
MAX_DELAY = 2.0
"""Maximum of the seconds between two all-reduces, even if they exceed `MAX_OVERHEAD`."""
MAX_STEPS = 200
"""Maximum number of steps between two all-reduces, because steps after an evaluation may be longer."""
REPEAT_SECONDS = 2.0
"""Seconds within which a repeated signal is one request, as it may be sent by a launcher and to its group."""

_ALLOCATION_END = "SLURM_JOB_END_TIME"
_AGENT = "torch.distributed.elastic"
_PURPOSE = "accelerate.Accelerator.should_stop"
_STOP_READ, _SAVE_READ = 1, 2
_TERMINATION_SIGNALS = (signal.SIGTERM, getattr(signal, "SIGBREAK", None))
_NUM_WARM_UP_CYCLES = 2  # the first all-reduce opens a process group, the first steps compile
_MAX_GROWTH = 2  # of the interval between two all-reduces

Reduce = Callable[[Sequence[float], str, str], AsyncReduction]


class RequestType(NamedTuple):
    """Type of request to save, named after its signal or setting."""

    name: str
    reason: str  # cause in messages, which is followed by a rank
    stops: bool  # whether the run also stops


SIGNALS = (
    RequestType("SIGTERM", "SIGTERM was sent to", stops=True),
    RequestType("SIGUSR1", "SIGUSR1 was sent to", stops=True),
    RequestType("SIGUSR2", "SIGUSR2 was sent to", stops=False),
    # Ctrl-Break, the only request signal that processes of a run on Windows receive
    *((RequestType("SIGBREAK", "SIGBREAK was sent to", stops=True),) if hasattr(signal, "SIGBREAK") else ()),
)
TIME_IS_UP = RequestType("max_time", "max_time is over on", stops=True)
ALLOCATION_ENDS = RequestType("allocation", "the SLURM allocation ends soon, as read by", stops=True)
STOP_FILE = RequestType("stop_file", "the stop_file was found by", stops=True)
SAVE_FILE = RequestType("save_file", "a change of the save_file was found by", stops=False)
# It does not stop the run, because Ray does not restart a run whose functions have returned.
PREEMPTION = RequestType("preemption", "Ray preempts a node, as reported to", stops=False)

REQUEST_TYPES = (*SIGNALS, TIME_IS_UP, ALLOCATION_ENDS, STOP_FILE, SAVE_FILE, PREEMPTION)
"""Request types in the order in which ranks reduce them."""


class RequestSource(NamedTuple):
    """Source of requests of one type."""

    kind: RequestType
    is_requested: Callable[[], bool]


def deadline(kind: RequestType, at: float, clock: Callable[[], float] = time.monotonic) -> RequestSource:
    """Returns a source with a request from a time of the clock on."""
    return RequestSource(kind, lambda: clock() >= at)


def stop_file(path: str) -> RequestSource:
    """Returns a source with a request as long as a file exists, even if it existed at the start."""
    return RequestSource(STOP_FILE, partial(os.path.exists, os.path.expanduser(path)))


def save_file(path: str) -> RequestSource:
    """Returns a source with one request each time that a file is created or touched."""
    path = os.path.expanduser(path)
    modified = _modification_time(path)

    def is_requested() -> bool:
        nonlocal modified
        before, modified = modified, _modification_time(path)
        return modified not in (None, before)

    return RequestSource(SAVE_FILE, is_requested)


def preemption(read: Callable[[], object]) -> RequestSource:
    """Returns a source with one request for each preemption.

    All workers call it together, because `read` is a barrier in Ray Train.
    """
    last: object = None

    def is_requested() -> bool:
        nonlocal last
        with flight_recorder().entry("ray.train.get_preemption_info"):
            before, last = last, read()
        return last not in (None, before)

    return RequestSource(PREEMPTION, is_requested)


def find_preemption_reader() -> Callable[[], object] | None:
    """Returns the function of Ray Train that returns preemptions, or None outside of its workers."""
    train: Any = sys.modules.get("ray.train")
    read: Callable[[], object] | None = getattr(train, "get_preemption_info", None)
    if read is None:
        return None
    try:
        train.get_context()
    except (RuntimeError, DeprecationWarning):  # a driver, or a trial of Ray Tune
        return None
    return read


def throttled(source: RequestSource, clock: Callable[[], float] = time.monotonic) -> RequestSource:
    """Returns a source that reads another one at most once per `MIN_READ_INTERVAL`."""
    next_read = -math.inf

    def is_requested() -> bool:
        nonlocal next_read
        now = clock()
        if now < next_read:
            return False
        next_read = now + MIN_READ_INTERVAL
        return source.is_requested()

    return RequestSource(source.kind, is_requested)


def process_age() -> float:
    import psutil  # needed only by a run with `max_time`

    return time.time() - psutil.Process().create_time()


def find_sources(
    settings: StoppingSection,
    environ: Mapping[str, str],
    *,
    reads_files: bool,
    age: Callable[[], float] = process_age,
) -> list[RequestSource]:
    """Returns the sources of requests of this process, except for signals.

    `reads_files` is True for the one process of each node that reads files.
    """
    now = time.monotonic()
    sources: list[RequestSource] = []
    if settings.max_time is not None:
        try:
            budget = read_seconds(settings.max_time)
        except ValueError:
            fix = "Write seconds (5400), HH:MM:SS (01:30:00) or D-HH:MM:SS (1-12:00:00)"
            reason = "this is not a span of time"
            raise wrong_value("ACCELERATE_MAX_TIME", settings.max_time, reason, fix) from None
        sources.append(deadline(TIME_IS_UP, now - age() + budget))
    end = environ.get(_ALLOCATION_END, "")
    margin = DEFAULT_MARGIN if settings.stop_margin is None else settings.stop_margin
    if end.isdecimal() and margin:
        sources.append(deadline(ALLOCATION_ENDS, now + float(end) - time.time() - margin))
    if reads_files and settings.stop_file:
        sources.append(throttled(stop_file(settings.stop_file)))
    if reads_files and settings.save_file:
        sources.append(throttled(save_file(settings.save_file)))
    if (read := find_preemption_reader()) is not None:
        sources.append(preemption(read))
    return sources


def steps_between(step: float, cost: float) -> int:
    """Returns the number of steps between two all-reduces, from the seconds of a step and an all-reduce."""
    if step <= 0:
        return 1
    min_steps = math.ceil(cost / (MAX_OVERHEAD * step))
    max_steps = min(int(MAX_DELAY / step), MAX_STEPS)
    return max(1, min(min_steps, max_steps))


def read_requests(sources: Iterable[RequestSource]) -> set[RequestType]:
    return {source.kind for source in sources if source.is_requested()}


def _modification_time(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # a missing or inaccessible file requests nothing
        return None


class _Installed(list["SignalRecorder"]):
    """List of the recorder whose handlers are set, which has at most one element."""


class SignalRecorder:
    """Recorder of signals, which keeps them until the training loop reads them.

    Handlers are set at the first read, and restored at the end. Each calls the handler that it replaces. A
    second SIGTERM is not recorded, but handled as without the recorder. The same applies to all signals in a
    fork of this process, because SIGTERM is to end such a process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        existing = (kind for kind in SIGNALS if hasattr(signal, kind.name))
        self._kinds = {getattr(signal, kind.name): kind for kind in existing}
        self._received: set[RequestType] = set()
        self._previous_handlers: dict[int, Any] = {}
        self._first_termination: float | None = None
        self._process = 0

    def install(self) -> None:
        """Sets the handlers, and takes the signals that were received while the script was starting.

        A recorder of an earlier run in this process is restored first.
        """
        if threading.current_thread() is not threading.main_thread():
            text = (
                "should_stop and should_save are read in a thread, where Python cannot handle signals: time "
                "limits, files and preemptions by Ray Train have an effect, signals have none. To handle "
                "signals, read one of them in the main thread first."
            )
            logger.warning(text, main_process_only=False)
            return
        installed = services.of_process(_Installed)
        for recorder in list(installed):
            recorder.restore()
        for number in self._kinds:
            if signal.getsignal(number) is not None:  # a handler in C gives None, and could not be restored
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._received |= {self._kinds[number] for number in NOTES.take()}
        installed.append(self)
        self._process = os.getpid()

    def restore(self) -> None:
        """Restores the previous handlers, unless other code has replaced the handlers of this recorder."""
        installed = services.of_process(_Installed)
        if self not in installed or threading.current_thread() is not threading.main_thread():
            return
        installed.remove(self)
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
        self._previous_handlers.clear()

    def take(self) -> set[RequestType]:
        received, self._received = self._received, set()
        return received

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_fork = os.getpid() != self._process
        if is_fork or (number in _TERMINATION_SIGNALS and self._is_second()):
            self.restore()
            signal.raise_signal(number)
            return
        self._received.add(self._kinds[number])
        previous = self._previous_handlers.get(number)
        # A process that is forked from the elastic agent inherits the handler of the agent.
        is_agent = str(getattr(previous, "__module__", "")).startswith(_AGENT)
        if callable(previous) and previous != NOTES.note and not is_agent:
            previous(number, frame)

    def _is_second(self) -> bool:
        now = self._clock()
        if self._first_termination is None:
            self._first_termination = now
        return now - self._first_termination > REPEAT_SECONDS


class StopRequests:
    """Requests of one run to stop and to save.

    All ranks read them equally often and in the same order.
    """

    def __init__(
        self,
        rank: int,
        sources: Sequence[RequestSource],
        signals: SignalRecorder,
        reduce: Reduce = reduce_async,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._sources, self._signals = rank, sources, signals
        self._reduce, self._clock = reduce, clock
        self._stop = self._save = False
        self._read = 0  # `_STOP_READ` and `_SAVE_READ` of this step
        self._steps_left = 1  # steps until the next action; below 1 there is none
        self._interval = 1  # steps between two all-reduces
        self._reduction: AsyncReduction | None = None
        self._cycles = 0
        self._cycle_start = self._spent = 0.0  # `_spent`: seconds of this object in the cycle

    def read_stop(self) -> bool:
        """Returns whether to leave the training loop.

        Once it is True, it stays True.
        """
        self._count(_STOP_READ, _SAVE_READ)
        return self._stop

    def read_save(self) -> bool:
        """Returns whether to save now, which is True once for each request."""
        self._count(_SAVE_READ, _STOP_READ)
        is_due, self._save = self._save, False
        return is_due

    def close(self) -> None:
        """Stops watching for requests.

        `read_stop` keeps its value.
        """
        self._steps_left = 0
        self._reduction = None
        self._signals.restore()

    def _count(self, read: int, other: int) -> None:
        """Counts a read, and a step if it is the first read of the step."""
        if self._read == other:
            self._read = read | other
            return
        self._read = read
        self._steps_left -= 1
        if not self._steps_left:
            self._advance()

    def _advance(self) -> None:
        now = self._clock()
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            self._take(reduction.wait())
            if self._stop:
                return  # no further action, as `_steps_left` goes below zero
            if self._interval > 1:
                self._steps_left = self._interval - 1
                self._spent += self._clock() - now
                return
        self._start_reduction(now)
        self._steps_left = 1
        self._spent += self._clock() - now

    def _start_reduction(self, now: float) -> None:
        """Starts an all-reduce of the requests of this rank and the times of its steps and all-reduces."""
        if not self._cycles:
            self._signals.install()
        step, cost = 0.0, 0.0
        if self._cycles >= _NUM_WARM_UP_CYCLES:
            step, cost = (now - self._cycle_start - self._spent) / self._interval, self._spent
        self._cycles += 1
        self._cycle_start, self._spent = now, 0.0
        requests = read_requests(self._sources) | self._signals.take()
        numbers = [self._rank + 1.0 if kind in requests else 0.0 for kind in REQUEST_TYPES]
        # The slowest step counts, and the fastest all-reduce, as slower ones waited for another rank.
        self._reduction = self._reduce([*numbers, step, -cost], "max", _PURPOSE)

    def _take(self, numbers: Sequence[float]) -> None:
        *requests, step, cost = numbers
        for kind, process in zip(REQUEST_TYPES, requests, strict=True):
            if process:
                self._save = True
                self._stop |= kind.stops
                action = "save and stop" if kind.stops else "save"
                record_event("stop" if kind.stops else "save", f"{kind.reason} rank {process - 1:.0f}")
                logger.warning(f"All ranks {action} now: {kind.reason} rank {process - 1:.0f}.")
                if kind.name == "SIGTERM":
                    SCRIPT.ended_rank = int(process) - 1
        # A script that reads twice in a step makes the first steps look short.
        self._interval = min(steps_between(step, -cost), self._interval * _MAX_GROWTH)


def get_stop_requests(environ: Mapping[str, str]) -> StopRequests:
    """Returns the requests of this run, which a reset of the state closes."""
    stop_requests = services.find(StopRequests)
    if stop_requests is None:
        state, signals = PartialState(), SignalRecorder()
        settings = decode(StoppingSection, environ)
        sources = find_sources(settings, environ, reads_files=state.is_local_main_process)
        stop_requests = StopRequests(state.process_index, sources, signals)
        services.put(StopRequests, stop_requests, end=stop_requests.close)
    return stop_requests
