"""Watchdog of one rank, which detects deadlocks and answers inquiries of other ranks about them.

`Accelerator` starts it with `start`, and it ends with the process group. It checks about once per second, in
its own thread. This costs the training thread no time, and works while that thread is blocked outside of
Python. It makes a request to the store at each check while the rank waits, and otherwise at each fourth
check, so that the store can serve many ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial
from types import TracebackType
from typing import Any

from accelerate.base import environ as variables
from accelerate.data_loader import WorkersObserver
from accelerate.diagnostics import processes
from accelerate.diagnostics.arrivals import SECONDS_TO_ANSWER, SECONDS_TO_END, ArrivalWatch
from accelerate.diagnostics.hang_report import (
    Activity,
    HangReporter,
    Limits,
    RankState,
    Report,
    format_report,
    is_hang,
)
from accelerate.diagnostics.observation import GROWTH, ThreadObserver, watch_iterator
from accelerate.diagnostics.peers import STORE_TIMEOUT, Peers, own_identity
from accelerate.ops import flight_recorder
from accelerate.settings import decode
from accelerate.settings.sections import DiagnosticsSection
from accelerate.state import PartialState, Topology, process_group, services

DEFAULT_TIMEOUT = 60.0  # seconds, default of `hang_timeout`

_logger = logging.getLogger(__name__)

CHECKS_PER_IDLE_REQUEST = 4
"""Number of checks per request to the store while the rank does not wait."""
_ANSWER_READS = (1.25, 2.25, 4.0, 5.5)
"""Times at which answers to an inquiry are read, in check intervals, until ranks that do not wait check."""
_WAITING_RANKS_ANSWER = 2.25
"""Check intervals within which waiting ranks answer, after which a report about an ended rank is complete."""
_SLOW = 1.0
"""Seconds of one request from which on the store counts as slow."""
_REQUESTS_TO_ANSWER, _MAX_STORE_SECONDS = 4, 30.0
"""Number of requests of a rank that answers, and the maximum of the seconds that others wait for them."""

THREAD_NAME = "accelerate-watchdog"
SECONDS_TO_CONNECT = 5.0
"""Seconds after its start until which rank 0, when it ends, waits for ranks to connect to its store."""


class Watchdog:
    """Watchdog of one rank, which checks in a thread until `stop` or `end` is called.

    It is a service of the process.
    """

    def __init__(
        self, rank: int, limits: Limits, peers: Peers, observer: ThreadObserver, reporter: HangReporter
    ) -> None:
        self.rank = rank
        self._start_time = time.monotonic()
        self.ended = threading.Event()
        self.ending = "given up its state"
        self.failed = False
        self.failed_operation: RankState | None = None  # state in which an operation with other ranks failed
        self._limits, self._peers, self._observer, self._reporter = limits, peers, observer, reporter
        self._num_checks = 0
        self._seconds_of_request = 0.0  # of the last read of the counter
        self._num_reports = 0  # at the last read of the counter
        self._answered = 0  # number of the last inquiry that this rank has answered
        self._read = 0  # number of the last inquiry whose report it has read
        self._answered_at = 0.0
        self._token: object = None  # identifies the current wait
        self._report_after = limits.timeout  # seconds of the current wait before it is reported
        self._reported_ends: set[int] = set()  # ranks whose end was reported
        self._reported: object = None  # token of the wait that this rank reported last
        self._is_over = False
        self._data_timeout = limits.timeout  # grows, because a loader may be slow at each batch
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self.run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, ending: str) -> None:
        """Ends the watchdog, and posts `ending`, which is text after "rank 1 has"."""
        self.ending = ending
        if process_group.failed():
            self.failed = True
            self.failed_operation = find_failed_operation(self.rank, sys.last_traceback)
        self.end()
        self._thread.join(SECONDS_TO_END)

    def end(self) -> None:
        """Ends the watchdog, but not in a fork, which may have inherited the held lock of the event."""
        if os.getpid() == self._pid:
            self.ended.set()

    def run(self) -> None:
        """Checks until the end.

        If the store has ended, it reports once the state of this rank alone.
        """
        try:
            while not self.ended.wait(self._limits.interval):
                self.check()
            self.post_end(self.ending, self.failed, self.failed_operation)
            if self.rank == 0:  # it hosts the store, to which other ranks may still connect
                remaining = self._start_time + SECONDS_TO_CONNECT - time.monotonic()
                self._peers.wait_for_identities(remaining)
        except RuntimeError as error:  # raised by torch if the store does not respond
            self._watch_alone(str(error).splitlines()[0])
        finally:
            self._observer.release()

    def _watch_alone(self, reason: str) -> None:
        while not self.ended.wait(self._limits.interval):
            _, seconds = self._observer.current_wait()
            if seconds >= self._limits.liveness_timeout:
                report = self._report_alone(self._observer.state(), reason)
                if report.aborts:
                    self._reporter.prepare_end(report)
                    self._reporter.end()
                return
        if self.failed_operation is not None:
            self._report_alone(self.failed_operation, reason)

    def _report_alone(self, state: RankState, reason: str) -> Report:
        text = (
            f"{format_report([state], os.getcwd())}\nThe others cannot be asked: the store of the run is "
            f"gone ({reason}). The process that keeps it, rank 0 or the launcher, has most likely ended."
        )
        report = self._build_report(text, [self.rank], [], aborts=self._limits.aborts)
        self._reporter.publish(report)
        return report

    def check(self) -> None:
        """Checks once, which answers other ranks, reads reports, and begins an inquiry after the timeout."""
        token, seconds = self._observer.current_wait()
        if token != self._token:
            is_data = isinstance(token, tuple) and token[0] == Activity.DATA
            self._token, self._report_after = token, self._data_timeout if is_data else self._limits.timeout
        self._num_checks += 1
        is_waiting = token is not None and seconds >= self._limits.liveness_timeout
        if is_waiting or self._is_inquiring() or self._num_checks % CHECKS_PER_IDLE_REQUEST == 0:
            self._read_events(seconds)
        self._peers.check_local_processes(is_waiting)
        self._report_end_of_hang()
        if not is_waiting or self._is_inquiring():
            return
        if seconds >= self._report_after or self._peers.ended().keys() - self._reported_ends:
            self._inquire(seconds)

    def _is_inquiring(self) -> bool:
        """Returns whether a report is expected.

        A rank that began an inquiry and posts no report has died meanwhile.
        """
        since_answer = time.monotonic() - self._answered_at
        timeout = 3 * SECONDS_TO_ANSWER + 2 * self._seconds_of_store()
        return self._read < self._answered and since_answer < timeout

    def _seconds_of_store(self) -> float:
        """Returns the seconds that the store adds to the time of an answer."""
        return min(_REQUESTS_TO_ANSWER * self._seconds_of_request, _MAX_STORE_SECONDS)

    def post_end(self, ending: str, failed: bool, failed_operation: RankState | None) -> None:
        """Posts how this process ends, and reports the ranks that ended before and made it fail.

        `failed_operation` is the state in which an operation with other ranks failed, or None.
        """
        self._peers.leave(ending)
        if self._reported is not None and not failed:
            self._withdraw()
        if failed_operation is None:
            return
        self._peers.events()
        self._peers.check_local_processes(is_waiting=True)
        ended = self._peers.ended()
        if ended and not self._reported_ends and self._peers.is_first_to_report():
            states = self._peers.silent_states(list(ended))
            text = format_report(
                sorted([failed_operation, *states], key=lambda state: state.rank), os.getcwd()
            )
            self._reporter.publish(self._build_report(text, [self.rank], list(ended), aborts=False))

    def _read_events(self, seconds: float) -> None:
        """Answers the last inquiry, and reads its report if it is posted."""
        start = time.monotonic()
        events = self._peers.events()
        self._seconds_of_request = time.monotonic() - start
        is_new, was_reported = events.asked > self._answered, events.reported != self._num_reports
        self._num_reports = events.reported
        if is_new:
            self._begin_inquiry(events.asked, seconds)
        number = self._answered
        report = self._peers.report(number) if was_reported and self._read < number else None
        if report is not None:
            self._follow(number, report)
        elif is_new:
            self._peers.answer(number, self._observer.state())

    def _begin_inquiry(self, number: int, seconds: float) -> None:
        self._answered, self._answered_at = number, time.monotonic()
        self._report_after = max(self._report_after, seconds * GROWTH)

    def _inquire(self, seconds: float) -> None:
        if not self._peers.ask(self._answered):
            return
        own = self._observer.state()
        self._begin_inquiry(self._answered + 1, seconds)
        answers = self._collect(own)
        ended = self._peers.ended()
        missing = [rank for rank in self._peers.others if rank not in answers]
        states = sorted((*answers.values(), *self._describe(missing)), key=lambda state: state.rank)
        is_hanging = is_hang(states) and self._observer.current_wait()[0] == self._token
        is_slow = not is_hanging and any(
            s.activity == Activity.DATA and s.seconds >= self._limits.timeout for s in states
        )
        if is_slow:
            self._data_timeout = seconds * GROWTH
        text = format_report(states, os.getcwd()) if is_hanging or is_slow else ""
        report = self._build_report(
            text, list(answers), list(ended), aborts=is_hanging and self._limits.aborts
        )
        self._peers.announce(self._answered, report)
        self._reported = self._token if is_hanging or is_slow else None
        self._follow(self._answered, report)

    def _collect(self, own: RankState) -> dict[int, RankState]:
        """Returns the states of the ranks that answer, which have more time if the store is slow."""
        started, states = time.monotonic(), {self.rank: own}
        for interval in _ANSWER_READS:
            due = started + interval * self._limits.interval + self._seconds_of_store()
            time.sleep(max(due - time.monotonic(), 0.0))
            states |= self._peers.answers(self._answered)
            ended = self._peers.ended().keys()
            if len(states.keys() | ended) > len(self._peers.others) or (
                ended - self._reported_ends and interval >= _WAITING_RANKS_ANSWER
            ):
                break
        return states

    def _describe(self, missing: list[int]) -> list[RankState]:
        """Returns the states of ranks that have not answered.

        If they did not have enough time to answer, their states say so.
        """
        ended = self._peers.ended()
        late = [rank for rank in missing if rank not in ended]
        text = ""
        if self._seconds_of_request >= _SLOW:
            seconds = f"{self._seconds_of_request:.1f} s for a request"
            text = f"gave no answer yet: the store of the run is slow ({seconds})"
        elif ended.keys() - self._reported_ends:
            text = "gave no answer yet"
        if not text:
            return self._peers.silent_states(missing)
        ended_states = self._peers.silent_states([rank for rank in missing if rank in ended])
        return [*ended_states, *(RankState(rank, Activity.SILENT, ending=text) for rank in late)]

    def _build_report(self, text: str, answered: list[int], ended: list[int], *, aborts: bool) -> Report:
        running = [rank for rank in answered if rank not in ended]
        return Report(text, min(running, default=self.rank), aborts, len(answered), ended)

    def _follow(self, number: int, report: Report) -> None:
        self._read = number
        self._reported_ends |= set(report.ended)
        if report.text and report.printer == self.rank:
            self._reporter.publish(report)
        if report.aborts and self._may_end():
            self._reporter.prepare_end(report)
            with suppress(RuntimeError):  # the process that hosts the store has ended before this one
                # The end of this process may end the store, so other ranks read the report first.
                self._peers.confirm(number, report.num_answered, SECONDS_TO_ANSWER)
            self._reporter.end()

    def _may_end(self) -> bool:
        """Returns whether a report may end this process.

        Any process with access to the store may have written a report without a signature. After such a
        report, a rank only ends if it has itself waited for the timeout. Other ranks are ended by their
        launcher.
        """
        _, seconds = self._observer.current_wait()
        return self._peers.is_signed or (self._limits.aborts and seconds >= self._limits.timeout)

    def _report_end_of_hang(self) -> None:
        """Withdraws the report of this rank one check after its wait is over.

        The wait may have ended with an error, after which the process ends before the next check.
        """
        if self._reported is None or self._reported == self._token:
            return
        if self._is_over:
            self._withdraw()
        self._is_over = not self._is_over

    def _withdraw(self) -> None:
        self._reporter.withdraw(f"accelerate: the hang is over: rank {self.rank} continues.")
        self._reported = None


class LoaderWatch(WorkersObserver):
    """Watch of the loaders with workers in a run of one process, which reports slow batches."""

    def __init__(self, limits: Limits, environ: Mapping[str, str]) -> None:
        self._limits, self._environ = limits, environ

    @cached_property
    def _reporter(self) -> HangReporter:
        return HangReporter(0, 1, self._environ)

    def follow(self, iterator: Iterator[Any]) -> None:
        watch_iterator(iterator, self._limits, self._reporter)


def read_limits(environ: Mapping[str, str]) -> Limits:
    settings = decode(DiagnosticsSection, environ)
    return Limits(
        timeout=DEFAULT_TIMEOUT if settings.hang_timeout is None else settings.hang_timeout,
        aborts=settings.hang_action == "abort",
    )


def start(state: PartialState, environ: Mapping[str, str]) -> None:
    """Starts the watchdog of this rank, unless it is started, or with one process the watch of loaders.

    Called on all ranks. The watchdog ends with the process group, the state or the process.
    """
    limits = read_limits(environ)
    if limits.timeout and state.num_processes == 1:
        services.put(WorkersObserver, LoaderWatch(limits, environ))
    is_alone = state.num_processes == 1 or not process_group.is_open()
    if is_alone or not limits.timeout or services.find(Watchdog) is not None:
        return
    try:
        channel = process_group.connect_channel("hangs", STORE_TIMEOUT)
    except RuntimeError as error:
        _logger.warning("Hangs will not be explained: the store of the run gives no connection (%s).", error)
        return
    if channel is None:
        return
    rank, size, identity, recorder = (
        state.process_index,
        state.num_processes,
        own_identity(),
        flight_recorder(),
    )
    recorder.reset()  # the current thread is the training thread
    peers = Peers(channel, rank, size, identity, state.topology.local_size)
    observer = ThreadObserver(recorder, rank, identity.host, identity.pid)
    watchdog = Watchdog(rank, limits, peers, observer, HangReporter(rank, size, environ))
    watchdog.start()
    services.put(Watchdog, watchdog, close=partial(stop, "closed its process group"), end=watchdog.end)


def stop(ending: str) -> None:
    """Stops the watchdog of this process, if there is one.

    `ending` is text after "rank 1 has" in reports.
    """
    watchdog = services.remove(Watchdog)
    if watchdog is not None:
        watchdog.stop(ending)


def find_failed_operation(rank: int, trace: TracebackType | None) -> RankState | None:
    """Returns the state in which an operation with other ranks failed, or None for other errors."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    if not processes.may_wait(trace.tb_frame):
        return None
    position = processes.read_position(trace.tb_frame)
    last = flight_recorder().entries()[-1:]
    operation: tuple[str, str, int] = (Activity.TORCH, position.waits_in, 0)
    if last and (last[0].file, last[0].line) == (position.file, position.line):
        operation = (Activity.COLLECTIVE, last[0].operation, last[0].sequence)
    return RankState(rank, *operation, file=position.file, line=position.line)


def _stop_at_exit() -> None:
    error = getattr(sys, "last_type", None)
    stop(f"exited with {error.__name__}" if process_group.failed() and error else "exited (no Python error)")
    # The watchdog of a state that was reset may still post its end. A thread that returns from torch while
    # the interpreter finalizes aborts the process.
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(SECONDS_TO_END)


def watch_arrivals(topology: Topology, num_opened: int) -> AbstractContextManager[object]:
    """Returns a context manager that reports ranks that are missing in `init_process_group`."""
    environ = variables.current()
    limits = read_limits(environ)
    return ArrivalWatch(topology, num_opened, limits, environ) if limits.timeout else nullcontext()


# Registered after the exit handler of the process group, and so called before it.
atexit.register(_stop_at_exit)
