"""The hang detector of one rank: it detects deadlocks, answers other ranks, and ends with the process group.

It looks about once a second, from a thread of its own. That costs the training thread nothing, and works
while it is blocked outside Python. It asks the store at each look while the rank waits, and otherwise at each
fourth, so that the store answers any number of ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import TracebackType

from accelerate.base import environ as variables
from accelerate.data_loader import WorkersObserver
from accelerate.diagnostics import processes
from accelerate.diagnostics.arrivals import SECONDS_TO_ANSWER, SECONDS_TO_END, ArrivalWatch
from accelerate.diagnostics.hang_report import Doing, Limits, Outlet, RankState, Report, compose, is_hang
from accelerate.diagnostics.observation import GROWTH, LoaderWatch, Observation
from accelerate.diagnostics.peers import PATIENCE, Peers, own_identity
from accelerate.ops import flight_recorder
from accelerate.settings import decode
from accelerate.settings.sections import DiagnosticsSection
from accelerate.state import PartialState, Topology, process_group, services

DEFAULT_SECONDS = 60.0

_logger = logging.getLogger(__name__)

IDLE_LOOKS = 4
"""Looks of a rank that does not wait for each request to the store."""
_READINGS = (1.25, 2.25, 4.0, 5.5)
"""When answers to an inquiry are read, in pauses after it: by then ranks that do not wait look too."""
_SOON = 2.25
"""Pauses within which ranks that wait answer; a report about a rank that has ended waits for no other."""
_SLOW = 1.0
"""Seconds for one request, from which on a store is slow."""
_REQUESTS_TO_ANSWER, _LONGEST = 4, 30.0
"""Requests for which a rank that answers waits, and for how many seconds at most others wait for these."""

SECONDS_TO_CONNECT = 5.0
"""How long after its start rank 0 waits, when it ends, for ranks that have not connected to its store yet."""


class Watchdog:
    """Watches one rank in a thread, until `stop` or `end` is called; a service of the run."""

    def __init__(
        self, rank: int, limits: Limits, peers: Peers, observation: Observation, outlet: Outlet
    ) -> None:
        self.rank = rank
        self._started = time.monotonic()
        self.ended = threading.Event()
        self.ending = "given up its state"
        self.failed = False
        self.lost: RankState | None = None  # where an operation with other ranks failed
        self._limits, self._peers, self._observation, self._outlet = limits, peers, observation, outlet
        self._num_looks = 0
        self._seconds_of_request = 0.0  # that the last look at the counter took
        self._num_reports = 0  # that were posted up to the last look
        self._answered = 0  # last inquiry that this rank has answered
        self._read = 0  # last inquiry whose report it has read
        self._answered_at = 0.0
        self._token: object = None
        self._next = limits.seconds  # how long the present wait may last until it is reported (again)
        self._named: set[int] = set()  # ranks that were reported to have ended
        self._reported: object = None  # the wait that this rank had reported last
        self._over = False
        self._patience_for_data = limits.seconds  # grows: a loader that is slow at each batch is no fault
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self.run, name="accelerate-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, ending: str) -> None:
        """End, and post that this process takes no further part, after "rank 1 has"."""
        self.ending = ending
        if process_group.failed():
            self.failed = True
            self.lost = lost_operation(self.rank, sys.last_traceback)
        self.end()
        self._thread.join(SECONDS_TO_END)

    def end(self) -> None:
        """End in its own process only: a fork may have the lock of the event as it was held."""
        if os.getpid() == self._pid:
            self.ended.set()

    def run(self) -> None:
        """Look until the end; without the store, report once what this rank sees alone."""
        try:
            while not self.ended.wait(self._limits.pause):
                self.look()
            self.post_end(self.ending, self.failed, self.lost)
            if self.rank == 0:  # it keeps the store: another rank would wait long for a connection to it
                left = self._started + SECONDS_TO_CONNECT - time.monotonic()
                self._peers.wait_for_identities(left)
        except RuntimeError as error:  # what torch raises when a store does not answer
            self._watch_alone(str(error).splitlines()[0])
        finally:
            self._observation.release()

    def _watch_alone(self, reason: str) -> None:
        while not self.ended.wait(self._limits.pause):
            _, seconds = self._observation.waited()
            if seconds >= self._limits.death:
                report = self._report_alone(self._observation.state(), reason)
                if report.ends:
                    self._outlet.prepare_end(report)
                    self._outlet.end()
                return
        if self.lost is not None:
            self._report_alone(self.lost, reason)

    def _report_alone(self, state: RankState, reason: str) -> Report:
        text = (
            f"{compose([state], os.getcwd())}\nThe others cannot be asked: the store of the run is gone "
            f"({reason}). The process that keeps it, rank 0 or the launcher, has most likely ended."
        )
        report = self._build_report(text, [self.rank], [], ends=self._limits.ends)
        self._outlet.publish(report)
        return report

    def look(self) -> None:
        """Look once: answer others, read reports, and ask when this rank waits too long."""
        token, seconds = self._observation.waited()
        if token != self._token:
            is_data = isinstance(token, tuple) and token[0] == Doing.DATA
            self._token, self._next = token, self._patience_for_data if is_data else self._limits.seconds
        self._num_looks += 1
        is_waiting = token is not None and seconds >= self._limits.death
        if is_waiting or self._is_inquiring() or self._num_looks % IDLE_LOOKS == 0:
            self._attend(seconds)
        self._peers.look_at_machine(is_waiting)
        self._report_end_of_hang()
        if not is_waiting or self._is_inquiring():
            return
        if seconds >= self._next or self._peers.ended().keys() - self._named:
            self._inquire(seconds)

    def _is_inquiring(self) -> bool:
        """Whether a report is to come; a rank that began an inquiry and posts none has died meanwhile."""
        since_answer = time.monotonic() - self._answered_at
        limit = 3 * SECONDS_TO_ANSWER + 2 * self._seconds_of_store()
        return self._read < self._answered and since_answer < limit

    def _seconds_of_store(self) -> float:
        """How much longer an answer takes than with a store that answers at once."""
        return min(_REQUESTS_TO_ANSWER * self._seconds_of_request, _LONGEST)

    def post_end(self, ending: str, failed: bool, lost: RankState | None) -> None:
        """Post how this process ends, and name those whose end before made it fail.

        `lost` is where this rank was when an operation with other ranks failed; None where none has failed.
        """
        self._peers.leave(ending)
        if self._reported is not None and not failed:
            self._withdraw()
        if lost is None:
            return
        self._peers.events()
        self._peers.look_at_machine(is_waiting=True)
        ended = self._peers.ended()
        if ended and not self._named and self._peers.is_first_to_report():
            states = self._peers.silent_states(list(ended))
            text = compose(sorted([lost, *states], key=lambda state: state.rank), os.getcwd())
            self._outlet.publish(self._build_report(text, [self.rank], list(ended), ends=False))

    def _attend(self, seconds: float) -> None:
        """Answer the last inquiry, and read its report when it is there."""
        before = time.monotonic()
        events = self._peers.events()
        self._seconds_of_request = time.monotonic() - before
        is_new, was_reported = events.asked > self._answered, events.reported != self._num_reports
        self._num_reports = events.reported
        if is_new:
            self._enter(events.asked, seconds)
        number = self._answered
        report = self._peers.report(number) if was_reported and self._read < number else None
        if report is not None:
            self._follow(number, report)
        elif is_new:
            self._peers.answer(number, self._observation.state())

    def _enter(self, number: int, seconds: float) -> None:
        self._answered, self._answered_at = number, time.monotonic()
        self._next = max(self._next, seconds * GROWTH)

    def _inquire(self, seconds: float) -> None:
        if not self._peers.ask(self._answered):
            return
        own = self._observation.state()
        self._enter(self._answered + 1, seconds)
        answers = self._collect(own)
        ended = self._peers.ended()
        missing = [rank for rank in self._peers.others if rank not in answers]
        states = sorted((*answers.values(), *self._describe(missing)), key=lambda state: state.rank)
        hang = is_hang(states) and self._observation.waited()[0] == self._token
        slow = not hang and any(s.doing == Doing.DATA and s.seconds >= self._limits.seconds for s in states)
        if slow:
            self._patience_for_data = seconds * GROWTH
        text = compose(states, os.getcwd()) if hang or slow else ""
        report = self._build_report(text, list(answers), list(ended), ends=hang and self._limits.ends)
        self._peers.announce(self._answered, report)
        self._reported = self._token if hang or slow else None
        self._follow(self._answered, report)

    def _collect(self, own: RankState) -> dict[int, RankState]:
        """The states of the ranks that answer: the slower the store, the more time they have."""
        started, states = time.monotonic(), {self.rank: own}
        for reading in _READINGS:
            due = started + reading * self._limits.pause + self._seconds_of_store()
            time.sleep(max(due - time.monotonic(), 0.0))
            states |= self._peers.answers(self._answered)
            ended = self._peers.ended().keys()
            if len(states.keys() | ended) > len(self._peers.others) or (
                ended - self._named and reading >= _SOON
            ):
                break
        return states

    def _describe(self, missing: list[int]) -> list[RankState]:
        """The states of ranks that have not answered. Only those that had time to do so are silent."""
        ended = self._peers.ended()
        late = [rank for rank in missing if rank not in ended]
        text = ""
        if self._seconds_of_request >= _SLOW:
            seconds = f"{self._seconds_of_request:.1f} s for a request"
            text = f"gave no answer yet: the store of the run is slow ({seconds})"
        elif ended.keys() - self._named:
            text = "gave no answer yet"
        if not text:
            return self._peers.silent_states(missing)
        gone = self._peers.silent_states([rank for rank in missing if rank in ended])
        return [*gone, *(RankState(rank, Doing.SILENT, ending=text) for rank in late)]

    def _build_report(self, text: str, answered: list[int], ended: list[int], *, ends: bool) -> Report:
        running = [rank for rank in answered if rank not in ended]
        return Report(text, min(running, default=self.rank), ends, len(answered), ended)

    def _follow(self, number: int, report: Report) -> None:
        self._read = number
        self._named |= set(report.ended)
        if report.text and report.printer == self.rank:
            self._outlet.publish(report)
        if report.ends and self._may_end():
            self._outlet.prepare_end(report)
            with suppress(RuntimeError):  # the process that keeps the store has ended before this one
                # The end of the first does not keep others from the report.
                self._peers.confirm(number, report.num_answered, SECONDS_TO_ANSWER)
            self._outlet.end()

    def _may_end(self) -> bool:
        """Whether a report may end this process: anybody may have written one that is not signed.

        Then this rank ends by what it sees itself, and one that does not wait is left to its launcher.
        """
        _, seconds = self._observation.waited()
        return self._peers.is_signed or (self._limits.ends and seconds >= self._limits.seconds)

    def _report_end_of_hang(self) -> None:
        """Withdraw the report of this rank a look after its wait is over: it may have ended in an error."""
        if self._reported is None or self._reported == self._token:
            return
        if self._over:
            self._withdraw()
        self._over = not self._over

    def _withdraw(self) -> None:
        self._outlet.withdraw(f"accelerate: the hang is over: rank {self.rank} goes on.")
        self._reported = None


def read_limits(environ: Mapping[str, str]) -> Limits:
    settings = decode(DiagnosticsSection, environ)
    return Limits(
        seconds=DEFAULT_SECONDS if settings.hang_timeout is None else settings.hang_timeout,
        ends=settings.hang_action == "abort",
    )


def start(state: PartialState, environ: Mapping[str, str]) -> None:
    """Watch this rank from now on; nothing happens a second time. One process is watched as it reads loaders.

    Called on every rank. The watcher ends with the process group, with the state, or with the process.
    """
    limits = read_limits(environ)
    if limits.seconds and state.num_processes == 1:
        services.put(WorkersObserver, LoaderWatch(limits, Outlet(0, 1, environ)))
    is_alone = state.num_processes == 1 or not process_group.is_open()
    if is_alone or not limits.seconds or services.find(Watchdog) is not None:
        return
    try:
        channel = process_group.connect_channel("hangs", PATIENCE)
    except RuntimeError as error:
        _logger.warning("Hangs will not be explained: the store of the run gives no connection (%s).", error)
        return
    if channel is None:
        return
    rank, size, own, record = state.process_index, state.num_processes, own_identity(), flight_recorder()
    record.reset()  # the thread that builds the state is the one that trains
    peers = Peers(channel, rank, size, own, state.topology.local_size)
    observation = Observation(record, rank, own.host, own.pid)
    watchdog = Watchdog(rank, limits, peers, observation, Outlet(rank, size, environ))
    watchdog.start()
    services.put(Watchdog, watchdog, close=partial(stop, "closed its process group"), end=watchdog.end)


def stop(ending: str) -> None:
    """End the watcher of this process, if there is one; `ending` is what follows "rank 1 has"."""
    watchdog = services.remove(Watchdog)
    if watchdog is not None:
        watchdog.stop(ending)


def lost_operation(rank: int, trace: TracebackType | None) -> RankState | None:
    """Where an operation with other ranks failed; None when the error came from somewhere else."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    if not processes.may_wait(trace.tb_frame):
        return None
    position = processes.read_position(trace.tb_frame)
    last = flight_recorder().entries()[-1:]
    what: tuple[str, str, int] = (Doing.TORCH, position.waits_in, 0)
    if last and (last[0].file, last[0].line) == (position.file, position.line):
        what = (Doing.COLLECTIVE, last[0].operation, last[0].sequence)
    return RankState(rank, *what, file=position.file, line=position.line)


def _stop_at_exit() -> None:
    error = getattr(sys, "last_type", None)
    stop(f"exited with {error.__name__}" if process_group.failed() and error else "exited (no Python error)")


def watch_arrivals(topology: Topology, opened: int) -> AbstractContextManager[object]:
    """Return a context in which ranks are reported that do not come to open the process group."""
    environ = variables.current()
    limits = read_limits(environ)
    return ArrivalWatch(topology, opened, limits, environ) if limits.seconds else nullcontext()


# Registered after the process group's own, and so called before it.
atexit.register(_stop_at_exit)
