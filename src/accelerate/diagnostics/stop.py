"""What asks a process to stop or to save: signals, time and files, each a row of one table."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from accelerate.base import read_seconds, wrong_value
from accelerate.settings.sections import StoppingSection

DEFAULT_MARGIN = 120
"""Seconds before the end of an allocation of SLURM; `stop_margin` says otherwise."""

SECONDS_BETWEEN_LOOKS = 1.0
"""Files are looked for at most this often: a shared file system takes its time."""

PRICE = 0.001
"""The part of the run that asking the other ranks may take from the training thread."""

REACTION = 2.0
"""Seconds after which ranks ask each other again, whatever it costs."""

MOST_ROUNDS = 200
"""Steps after which they do in any case: steps may become longer, from an evaluation to the next training."""

_ALLOCATION_END = "SLURM_JOB_END_TIME"


@dataclass(frozen=True)
class Trigger:
    """One thing that asks.

    Attributes:
        name: of the signal, or of what it is otherwise.
        reason: what has happened, as messages say it; a process number follows.
        stops: whether it asks to stop.
        saves: whether it asks to save.
    """

    name: str
    reason: str
    stops: bool
    saves: bool


SIGNALS = (
    Trigger("SIGTERM", "SIGTERM reached", stops=True, saves=True),
    Trigger("SIGUSR1", "SIGUSR1 reached", stops=True, saves=True),
    Trigger("SIGUSR2", "SIGUSR2 reached", stops=False, saves=True),
)
TIME_IS_UP = Trigger("max_time", "max_time is over, says", stops=True, saves=True)
ALLOCATION_ENDS = Trigger("allocation", "the SLURM allocation ends soon, says", stops=True, saves=True)
STOP_FILE = Trigger("stop_file", "the stop_file was found by", stops=True, saves=True)
SAVE_FILE = Trigger("save_file", "the save_file was touched, says", stops=False, saves=True)

TRIGGERS = (*SIGNALS, TIME_IS_UP, ALLOCATION_ENDS, STOP_FILE, SAVE_FILE)
"""All of them, in the order of their places in what ranks exchange."""


class Source(Protocol):
    """Something to look at for a request."""

    trigger: Trigger

    def asks(self) -> bool:
        """Whether it asks now."""
        ...


class Deadline:
    """Asks from some time on.

    Args:
        trigger: what it asks for.
        at: the time, on the clock.
        clock: gives the time.
    """

    def __init__(self, trigger: Trigger, at: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.trigger = trigger
        self.at = at
        self._clock = clock

    def asks(self) -> bool:
        """Whether the time has come."""
        return self._clock() >= self.at


class StopFile:
    """Asks as long as a file exists, also one that was there before.

    Args:
        path: of the file.
    """

    trigger = STOP_FILE

    def __init__(self, path: str) -> None:
        self._path = os.path.expanduser(path)

    def asks(self) -> bool:
        """Whether the file exists."""
        return os.path.exists(self._path)


class SaveFile:
    """Asks once each time that a file is touched; one that was there before does not ask.

    Args:
        path: of the file.
    """

    trigger = SAVE_FILE

    def __init__(self, path: str) -> None:
        self._path = os.path.expanduser(path)
        self._known = _touched(self._path)

    def asks(self) -> bool:
        """Whether the file was touched since the last call."""
        before, self._known = self._known, _touched(self._path)
        return self._known not in (None, before)


class Seldom:
    """Looks at a source now and then only.

    Args:
        source: costs something to look at.
        clock: gives the time.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self.trigger = source.trigger
        self._source = source
        self._clock = clock
        self._next = -math.inf

    def asks(self) -> bool:
        """Whether the source asks; between two looks it does not."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + SECONDS_BETWEEN_LOOKS
        return self._source.asks()


def process_age() -> float:
    """Return how many seconds ago this process was started."""
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

    Args:
        settings: what the user asked for.
        environ: this process's variables.
        looks_at_files: whether it is the one of its machine that looks at files.
        age: gives the seconds since this process started.

    Raises:
        ConfigurationError: a value that cannot be.
    """
    now = time.monotonic()
    sources: list[Source] = []
    if settings.max_time is not None:
        sources.append(Deadline(TIME_IS_UP, now - age() + read_max_time(settings.max_time)))
    left = _left_of_allocation(environ)
    margin = DEFAULT_MARGIN if settings.stop_margin is None else settings.stop_margin
    if left is not None and margin:
        sources.append(Deadline(ALLOCATION_ENDS, now + left - margin))
    if looks_at_files and settings.stop_file:
        sources.append(Seldom(StopFile(settings.stop_file)))
    if looks_at_files and settings.save_file:
        sources.append(Seldom(SaveFile(settings.save_file)))
    return sources


def read_max_time(text: str, place: str = "ACCELERATE_MAX_TIME") -> float:
    """Return a time budget in seconds.

    Args:
        text: as the user wrote it.
        place: where, for the error.

    Raises:
        ConfigurationError: it is no span of time.
    """
    try:
        return read_seconds(text)
    except ValueError:
        fix = "Write seconds (5400), HH:MM:SS (01:30:00) or D-HH:MM:SS (1-12:00:00)"
        raise wrong_value(place, text, "this is not a span of time", fix) from None


def rounds_between(step: float, cost: float) -> int:
    """Return after how many steps ranks ask each other again.

    Args:
        step: seconds of a step.
        cost: seconds that asking takes of it.
    """
    if step <= 0:
        return 1
    cheap = math.ceil(cost / (PRICE * step))
    quick = min(int(REACTION / step), MOST_ROUNDS)
    return max(1, min(cheap, quick))


def asked(sources: Iterable[Source]) -> set[Trigger]:
    """Return the triggers of those sources that ask now."""
    return {source.trigger for source in sources if source.asks()}


def _touched(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # not there, or not to be seen now: both mean that nobody asks
        return None


def _left_of_allocation(environ: Mapping[str, str]) -> float | None:
    end = environ.get(_ALLOCATION_END, "")
    return float(end) - time.time() if end.isdecimal() else None
