"""Whether to stop and to save: what one process is asked for, by signals, time or files, all do at one step.

Each read of an answer counts; the first of a step begins the next step. Every N steps the ranks begin to
exchange what they are asked for, and the step after that takes the result, so the exchange runs beside a
step. N follows from the time of a step and of an exchange, as the ranks agree on them.
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
from accelerate.launch import NOTES
from accelerate.logging import get_logger
from accelerate.ops import Answer, flight_recorder, reduce_async
from accelerate.settings import decode
from accelerate.settings.sections import StoppingSection
from accelerate.state import PartialState, note_event, services

logger = get_logger(__name__)

DEFAULT_MARGIN = 120
"""Seconds before the end of an allocation of SLURM; `stop_margin` changes it."""
SECONDS_BETWEEN_LOOKS = 1.0
"""Files are looked for at most this often: a shared file system takes its time."""
PRICE = 0.001
"""The part of the run that asking the other ranks may take from the training thread."""
REACTION = 2.0
"""Seconds after which ranks ask each other again, whatever it costs."""
MOST_ROUNDS = 200
"""Steps after which they do in any case: steps may become longer, from an evaluation to the next training."""
SECONDS_ALIKE = 2.0
"""One request may come twice, from a launcher and to the whole process group: within this time it is one."""

_ALLOCATION_END = "SLURM_JOB_END_TIME"
_AGENT = "torch.distributed.elastic"
_PURPOSE = "accelerate.Accelerator.should_stop"
_STOP_READ, _SAVE_READ = 1, 2
_ENDING = (signal.SIGTERM, getattr(signal, "SIGBREAK", None))
_CYCLES_TO_WARM = 2  # the first exchange opens a group, the first steps compile

Combine = Callable[[Sequence[float], str, str], Answer]


class Trigger(NamedTuple):
    """One kind of request to save, by the name of the signal or setting."""

    name: str
    reason: str  # what has happened, as messages say it; a process number follows
    stops: bool  # the run stops as well


SIGNALS = (
    Trigger("SIGTERM", "SIGTERM reached", stops=True),
    Trigger("SIGUSR1", "SIGUSR1 reached", stops=True),
    Trigger("SIGUSR2", "SIGUSR2 reached", stops=False),
    # Ctrl-Break, the only request that reaches the processes of a run on Windows
    *((Trigger("SIGBREAK", "SIGBREAK reached", stops=True),) if hasattr(signal, "SIGBREAK") else ()),
)
TIME_IS_UP = Trigger("max_time", "max_time is over, says", stops=True)
ALLOCATION_ENDS = Trigger("allocation", "the SLURM allocation ends soon, says", stops=True)
STOP_FILE = Trigger("stop_file", "the stop_file was found by", stops=True)
SAVE_FILE = Trigger("save_file", "the save_file was touched, says", stops=False)
# It does not stop: Ray restarts a run whose workers are preempted, unless their functions return before.
PREEMPTION = Trigger("preemption", "Ray preempts a node, says", stops=False)

TRIGGERS = (*SIGNALS, TIME_IS_UP, ALLOCATION_ENDS, STOP_FILE, SAVE_FILE, PREEMPTION)
"""All of them, in the order of the numbers that ranks exchange."""


class Source(NamedTuple):
    """Where a request may come from, and whether it asks now."""

    trigger: Trigger
    asks: Callable[[], bool]


def deadline(trigger: Trigger, at: float, clock: Callable[[], float] = time.monotonic) -> Source:
    """A source that asks from a time of the clock on."""
    return Source(trigger, lambda: clock() >= at)


def stop_file(path: str) -> Source:
    """A source that asks as long as a file exists, also one that was there before."""
    return Source(STOP_FILE, partial(os.path.exists, os.path.expanduser(path)))


def save_file(path: str) -> Source:
    """A source that asks once each time that a file is touched; one that was there before does not ask."""
    path = os.path.expanduser(path)
    touched = _time_of_change(path)

    def asks() -> bool:
        nonlocal touched
        before, touched = touched, _time_of_change(path)
        return touched not in (None, before)

    return Source(SAVE_FILE, asks)


def preemption(read: Callable[[], object]) -> Source:
    """A source that asks once for each preemption. All workers read together: Ray makes it a barrier."""
    known: object = None

    def asks() -> bool:
        nonlocal known
        with flight_recorder().entry("ray.train.get_preemption_info"):
            before, known = known, read()
        return known not in (None, before)

    return Source(PREEMPTION, asks)


def find_preemption_reader() -> Callable[[], object] | None:
    """Return the function with which Ray Train announces preemptions; None where this is not its worker."""
    train: Any = sys.modules.get("ray.train")
    read: Callable[[], object] | None = getattr(train, "get_preemption_info", None)
    if read is None:
        return None
    try:
        train.get_context()
    except (RuntimeError, DeprecationWarning):  # a driver, or a trial of Ray Tune
        return None
    return read


def seldom(source: Source, clock: Callable[[], float] = time.monotonic) -> Source:
    """A source that costs something, looked at now and then; between two looks it does not ask."""
    next_look = -math.inf

    def asks() -> bool:
        nonlocal next_look
        now = clock()
        if now < next_look:
            return False
        next_look = now + SECONDS_BETWEEN_LOOKS
        return source.asks()

    return Source(source.trigger, asks)


def process_age() -> float:
    import psutil  # only a run with a time budget pays for it

    return time.time() - psutil.Process().create_time()


def find_sources(
    settings: StoppingSection,
    environ: Mapping[str, str],
    *,
    looks_at_files: bool,
    age: Callable[[], float] = process_age,
) -> list[Source]:
    """Return what this process has to look at, beside signals.

    `looks_at_files` says whether it is the one of its machine that looks at files.
    """
    now = time.monotonic()
    sources: list[Source] = []
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
    if looks_at_files and settings.stop_file:
        sources.append(seldom(stop_file(settings.stop_file)))
    if looks_at_files and settings.save_file:
        sources.append(seldom(save_file(settings.save_file)))
    if (read := find_preemption_reader()) is not None:
        sources.append(preemption(read))
    return sources


def rounds_between(step: float, cost: float) -> int:
    """Return after how many steps ranks ask each other again, from the seconds of a step and of asking."""
    if step <= 0:
        return 1
    cheap = math.ceil(cost / (PRICE * step))
    quick = min(int(REACTION / step), MOST_ROUNDS)
    return max(1, min(cheap, quick))


def asked(sources: Iterable[Source]) -> set[Trigger]:
    return {source.trigger for source in sources if source.asks()}


def _time_of_change(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # not there, or not to be seen now: both mean that there is no request
        return None


class _Installed(list["SignalNotes"]):
    """The notes of this process whose handlers are set: at most one, as a process has one for each signal."""


class SignalNotes:
    """The signals that this process got, kept for later, where the training loop asks for them.

    Handlers are set when the first question is asked, and restored at the end; a handler that was there
    before is called as well. A second SIGTERM is not kept: it does what it did before. So is no signal in a
    fork of this process: whoever ends its own helpers with SIGTERM means it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        known = (trigger for trigger in SIGNALS if hasattr(signal, trigger.name))
        self._triggers = {getattr(signal, trigger.name): trigger for trigger in known}
        self._noted: set[Trigger] = set()
        self._before: dict[int, Any] = {}
        self._first_end: float | None = None
        self._process = 0

    def install(self) -> None:
        """Note signals from now on, and those that came while the script was starting.

        Notes of an earlier run in this process end.
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
        for notes in list(installed):
            notes.restore()
        for number in self._triggers:
            if signal.getsignal(number) is not None:  # None: set by a library in C, and lost if replaced
                self._before[number] = signal.signal(number, self._note)
        self._noted |= {self._triggers[number] for number in NOTES.take()}
        installed.append(self)
        self._process = os.getpid()

    def restore(self) -> None:
        """Bring back the handlers that were there before, where ours are still in place."""
        installed = services.of_process(_Installed)
        if self not in installed or threading.current_thread() is not threading.main_thread():
            return
        installed.remove(self)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        self._before.clear()

    def take(self) -> set[Trigger]:
        noted, self._noted = self._noted, set()
        return noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_fork = os.getpid() != self._process
        if is_fork or (number in _ENDING and self._is_second()):
            self.restore()
            signal.raise_signal(number)
            return
        self._noted.add(self._triggers[number])
        before = self._before.get(number)
        # A process forked from torch's agent inherits its handler, which is not meant for it.
        is_agent = str(getattr(before, "__module__", "")).startswith(_AGENT)
        if callable(before) and before != NOTES.note and not is_agent:
            before(number, frame)

    def _is_second(self) -> bool:
        now = self._clock()
        if self._first_end is None:
            self._first_end = now
        return now - self._first_end > SECONDS_ALIKE


class Agreement:
    """The answers of one run; read on all ranks equally often and in the same order."""

    def __init__(
        self,
        rank: int,
        sources: Sequence[Source],
        notes: SignalNotes,
        combine: Combine = reduce_async,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._sources, self._notes = rank, sources, notes
        self._combine, self._clock = combine, clock
        self._stop = self._save = False
        self._read = 0  # which answers were read in this step
        self._left = 1  # steps until there is something to do; below 1 there never is
        self._every = 1
        self._answer: Answer | None = None
        self._cycles = 0
        self._began = self._spent = 0.0

    def read_stop(self) -> bool:
        """Whether to leave the training loop; once true it stays true."""
        self._count(_STOP_READ, _SAVE_READ)
        return self._stop

    def read_save(self) -> bool:
        """Whether to save now; true once for each request."""
        self._count(_SAVE_READ, _STOP_READ)
        due, self._save = self._save, False
        return due

    def close(self) -> None:
        """Watch nothing any more; the answers stay as they are."""
        self._left = 0
        self._answer = None
        self._notes.restore()

    def _count(self, answer: int, other: int) -> None:
        """Count a read; the first one of a step begins the next step."""
        if self._read == other:
            self._read = answer | other
            return
        self._read = answer
        self._left -= 1
        if not self._left:
            self._advance()

    def _advance(self) -> None:
        now = self._clock()
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._take(answer.wait())
            if self._stop:
                return  # for good: `_left` counts on below zero
            if self._every > 1:
                self._left = self._every - 1
                self._spent += self._clock() - now
                return
        self._ask(now)
        self._left = 1
        self._spent += self._clock() - now

    def _ask(self, now: float) -> None:
        """Begin an exchange: what this process is asked for, and how long its steps and exchanges take."""
        if not self._cycles:
            self._notes.install()
        step, cost = 0.0, 0.0
        if self._cycles >= _CYCLES_TO_WARM:
            step, cost = (now - self._began - self._spent) / self._every, self._spent
        self._cycles += 1
        self._began, self._spent = now, 0.0
        requests = asked(self._sources) | self._notes.take()
        numbers = [self._rank + 1.0 if trigger in requests else 0.0 for trigger in TRIGGERS]
        # The slowest step counts, and the quickest exchange: others waited for a rank, not for the network.
        self._answer = self._combine([*numbers, step, -cost], "max", _PURPOSE)

    def _take(self, numbers: Sequence[float]) -> None:
        *requests, step, cost = numbers
        for trigger, process in zip(TRIGGERS, requests, strict=True):
            if process:
                self._save = True
                self._stop |= trigger.stops
                what = "save and stop" if trigger.stops else "save"
                note_event("stop" if trigger.stops else "save", f"{trigger.reason} process {process - 1:.0f}")
                logger.warning(f"All processes {what} now: {trigger.reason} process {process - 1:.0f}.")
        self._every = rounds_between(step, -cost)


def agreement_of_run(environ: Mapping[str, str]) -> Agreement:
    """Return the answers of this run, a service that a reset of the state closes."""
    agreement = services.find(Agreement)
    if agreement is None:
        state, notes = PartialState(), SignalNotes()
        settings = decode(StoppingSection, environ)
        sources = find_sources(settings, environ, looks_at_files=state.is_local_main_process)
        agreement = Agreement(state.process_index, sources, notes)
        services.put(Agreement, agreement, end=agreement.close)
    return agreement
