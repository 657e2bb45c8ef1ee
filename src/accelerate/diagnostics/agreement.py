"""Whether to stop and to save: what any process is asked for, all do at the same step.

Each read of an answer counts; the first of a step moves the step on. Every N steps ranks begin to exchange
what they are asked for, and the step after that takes the result, so the exchange runs beside a step. N
follows from the time of a step and of an exchange, as the ranks agree on them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from accelerate.diagnostics.signals import SignalNotes
from accelerate.diagnostics.stop import TRIGGERS, Source, asked, find_sources, rounds_between
from accelerate.logging import get_logger
from accelerate.ops import Answer, combine_aside
from accelerate.settings import decode
from accelerate.settings.sections import StoppingSection
from accelerate.state import PartialState, services

logger = get_logger(__name__)

_PURPOSE = "accelerate.Accelerator.should_stop"
_STOP_READ, _SAVE_READ = 1, 2
_CYCLES_TO_WARM = 2  # the first exchange opens a group, the first steps compile

Combine = Callable[[Sequence[float], str, str], Answer]


class Agreement:
    """The answers of one run; read on all ranks equally often and in the same order.

    Args:
        rank: of this process.
        sources: what to look at, beside signals.
        notes: the signals of this process.
        combine: combines numbers of all ranks.
        clock: gives the time.
    """

    def __init__(
        self,
        rank: int,
        sources: Sequence[Source],
        notes: SignalNotes,
        combine: Combine = combine_aside,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank = rank
        self._sources = sources
        self._notes = notes
        self._combine = combine
        self._clock = clock
        self._stop = False
        self._save = False
        self._read = 0  # which answers were read in this step
        self._left = 1  # steps until there is something to do; below 1 there never is
        self._every = 1
        self._answer: Answer | None = None
        self._cycles = 0
        self._began = 0.0
        self._spent = 0.0

    def read_stop(self) -> bool:
        """Whether to leave the training loop; once true it stays true."""
        read = self._read
        if read == _SAVE_READ:
            self._read = _SAVE_READ | _STOP_READ
            return self._stop
        self._read = _STOP_READ
        self._left -= 1
        if not self._left:
            self._advance()
        return self._stop

    def read_save(self) -> bool:
        """Whether to save now; true once for each request."""
        read = self._read
        if read == _STOP_READ:
            self._read = _SAVE_READ | _STOP_READ
        else:
            self._read = _SAVE_READ
            self._left -= 1
            if not self._left:
                self._advance()
        due, self._save = self._save, False
        return due

    def close(self) -> None:
        """Watch nothing any more; the answers stay as they are."""
        self._left = 0
        self._answer = None
        self._notes.restore()

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
        # The slowest step counts, and the quickest exchange: the others waited for a rank, not for the wire.
        self._answer = self._combine([*numbers, step, -cost], "max", _PURPOSE)

    def _take(self, numbers: Sequence[float]) -> None:
        *requests, step, cost = numbers
        for trigger, place in zip(TRIGGERS, requests, strict=True):
            if place:
                self._stop |= trigger.stops
                self._save |= trigger.saves
                what = "save and stop" if trigger.stops else "save"
                logger.warning(f"All processes {what} now: {trigger.reason} process {place - 1:.0f}.")
        self._every = rounds_between(step, -cost)


def agreement_of_run(environ: Mapping[str, str]) -> Agreement:
    """Return the answers of the run that this process takes part in; they go when its state is reset.

    Args:
        environ: this process's variables.

    Raises:
        ConfigurationError: a variable holds what cannot be.
    """
    return services.get(Agreement, partial(_open_agreement, environ))


def _open_agreement(environ: Mapping[str, str]) -> Agreement:
    state, notes = PartialState(), SignalNotes()
    settings = decode(StoppingSection, environ)
    sources = find_sources(settings, environ, looks_at_files=state.is_local_main_process)
    agreement = Agreement(state.process_index, sources, notes)
    weakref.finalize(agreement, notes.restore).atexit = False
    return agreement
