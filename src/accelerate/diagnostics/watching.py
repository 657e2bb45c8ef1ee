"""Start the watcher of this rank, and end it with the process group."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType

from accelerate.base import environ as variables
from accelerate.data_loader import WorkersObserver
from accelerate.diagnostics import stacks
from accelerate.diagnostics.arrivals import ArrivalWatch
from accelerate.diagnostics.hang_channel import HangChannel, Report, connect
from accelerate.diagnostics.hang_outlet import Outlet
from accelerate.diagnostics.hang_report import COLLECTIVE, TORCH, RankState, compose
from accelerate.diagnostics.loader_watch import LoaderWatch
from accelerate.diagnostics.observation import Observation
from accelerate.diagnostics.peers import Peers, own_identity
from accelerate.diagnostics.watchdog import Limits, Watchdog
from accelerate.ops import flight_recorder
from accelerate.settings import decode
from accelerate.settings.sections import DiagnosticsSection
from accelerate.state import PartialState, StoreChannel, Topology, process_group, services

DEFAULT_SECONDS = 60.0
SECONDS_TO_END = 10.0

_logger = logging.getLogger(__name__)


class Watching:
    """A running watcher; it ends with `stop`, or when nobody holds this object any more.

    Args:
        watcher: what its thread does.
    """

    def __init__(self, watcher: _Watcher) -> None:
        self._pid = os.getpid()
        self._watcher = watcher
        self._thread = threading.Thread(target=watcher.run, name="accelerate-watchdog", daemon=True)
        self._thread.start()
        weakref.finalize(self, watcher.end_in, self._pid)

    def stop(self, ending: str) -> None:
        """End the watcher, and tell the others that this process takes no further part.

        Args:
            ending: how, as what follows "rank 1 has".
        """
        if os.getpid() != self._pid:  # a fork has no watcher
            return
        self._watcher.ending = ending
        if process_group.failed():
            self._watcher.failed = True
            self._watcher.lost = lost_place(self._watcher.rank, sys.last_traceback)
        self._watcher.ended.set()
        self._thread.join(SECONDS_TO_END)


class _Watcher:
    """The body of the thread; it holds nothing that holds `Watching`."""

    def __init__(
        self, rank: int, limits: Limits, dog: Watchdog, observation: Observation, outlet: Outlet
    ) -> None:
        self.rank = rank
        self.ended = threading.Event()
        self.ending = "given up its state"
        self.failed = False
        self.lost: RankState | None = None
        self._limits = limits
        self._dog = dog
        self._observation = observation
        self._outlet = outlet

    def end_in(self, pid: int) -> None:
        """End the watcher in its own process only: a fork may have the lock of the event as it was held.

        Args:
            pid: number of that process.
        """
        if os.getpid() == pid:
            self.ended.set()

    def run(self) -> None:
        """Look until the end; without the store, what this rank knows alone is said once."""
        try:
            while not self.ended.wait(self._limits.pause):
                self._dog.look()
            self._dog.last_words(self.ending, self.failed, self.lost)
        except RuntimeError as error:  # what torch raises when a store does not answer
            self._watch_alone(str(error).splitlines()[0])
        finally:
            self._observation.release()

    def _watch_alone(self, reason: str) -> None:
        while not self.ended.wait(self._limits.pause):
            _, seconds = self._observation.waited()
            if seconds >= self._limits.death:
                self._tell_alone(self._observation.state(), reason)
                return
        if self.lost is not None:
            self._tell_alone(self.lost, reason)

    def _tell_alone(self, state: RankState, reason: str) -> None:
        text = (
            f"{compose([state], os.getcwd())}\nThe others cannot be asked: the store of the run is gone "
            f"({reason}). The process that keeps it, rank 0 or the launcher, has most likely ended."
        )
        report = Report(text, self.rank, self._limits.ends, time.time(), [self.rank], [])
        self._outlet.publish(report)
        if self._limits.ends and state is not self.lost:
            self._outlet.prepare_end(report)
            self._outlet.end()


def read_limits(environ: Mapping[str, str]) -> Limits:
    """Return for how long ranks may wait for each other, and what follows.

    Args:
        environ: variables of this process.

    Raises:
        ConfigurationError: `ACCELERATE_HANG_TIMEOUT` or `ACCELERATE_HANG_ACTION` cannot be.
    """
    settings = decode(DiagnosticsSection, environ)
    return Limits(
        seconds=DEFAULT_SECONDS if settings.hang_timeout is None else settings.hang_timeout,
        ends=settings.hang_action == "abort",
    )


def start(state: PartialState, environ: Mapping[str, str]) -> None:
    """Watch this rank from now on; nothing happens a second time. One process is watched as it reads loaders.

    Called on every rank. The watcher ends with the process group, with the state, or with the process.

    Args:
        state: which process this is.
        environ: variables of this process.

    Raises:
        ConfigurationError: `ACCELERATE_HANG_TIMEOUT` or `ACCELERATE_HANG_ACTION` cannot be.
    """
    limits = read_limits(environ)
    if limits.seconds and state.num_processes == 1:
        services.put(WorkersObserver, LoaderWatch(limits, Outlet(0, 1, environ)))
    if state.num_processes == 1 or not limits.seconds or not process_group.is_open():
        return
    if services.find(Watching) is not None:
        return
    try:
        channel = connect()
    except RuntimeError as error:
        _logger.warning("Hangs will not be explained: the store of the run gives no connection (%s).", error)
        return
    if channel is not None:
        watching = Watching(_build(state, limits, channel, environ))
        services.put(Watching, watching, close=partial(stop, "closed its process group"))


def stop(ending: str) -> None:
    """End the watcher of this process, if there is one.

    Args:
        ending: how this process ends its part, as what follows "rank 1 has".
    """
    watching = services.remove(Watching)
    if watching is not None:
        watching.stop(ending)


def _build(
    state: PartialState, limits: Limits, channel: StoreChannel, environ: Mapping[str, str]
) -> _Watcher:
    rank, size, own = state.process_index, state.num_processes, own_identity()
    hang_channel = HangChannel(channel, rank)
    hang_channel.introduce(own)
    record = flight_recorder()
    record.reset()  # the thread that builds the state is the one that trains
    observation = Observation(record, rank, own.host, own.pid)
    peers = Peers(hang_channel, own, tuple(other for other in range(size) if other != rank))
    outlet = Outlet(rank, size, environ)
    dog = Watchdog(rank, limits, hang_channel, peers, observation, outlet)
    return _Watcher(rank, limits, dog, observation, outlet)


def lost_place(rank: int, trace: TracebackType | None) -> RankState | None:
    """Where an operation with other ranks failed; None when the error came from somewhere else.

    Args:
        rank: of this process.
        trace: of the error.
    """
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    if not stacks.may_wait(trace.tb_frame):
        return None
    position = stacks.read_position(trace.tb_frame)
    last = flight_recorder().entries()[-1:]
    if last and (last[0].file, last[0].line) == (position.file, position.line):
        operation, sequence, doing = last[0].operation, last[0].sequence, COLLECTIVE
    else:
        operation, sequence, doing = position.waits_in, 0, TORCH
    return RankState(
        rank, doing, operation=operation, sequence=sequence, file=position.file, line=position.line
    )


def _stop_at_exit() -> None:
    error = getattr(sys, "last_type", None)
    stop(f"exited with {error.__name__}" if process_group.failed() and error else "exited (no Python error)")


def _watch_arrivals(topology: Topology, opened: int) -> AbstractContextManager[object]:
    environ = variables.current()
    limits = read_limits(environ)
    return ArrivalWatch(topology, opened, limits, environ) if limits.seconds else nullcontext()


services.while_opening.append(_watch_arrivals)
# Registered after the process group's own, and so called before it.
atexit.register(_stop_at_exit)
