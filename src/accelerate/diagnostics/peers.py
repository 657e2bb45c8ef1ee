"""Exchange of states and reports of hangs between the ranks over the store, for the watchdog of each rank.

One counter has the number of ranks that have ended, and of inquiries that were begun and reported. A rank
reads it with one request, and reads lists only after it has changed. Inquiries are numbered. A rank begins
an inquiry by incrementing the number, the other ranks append their states to one list, and the rank that
asked posts the report. The lowest running rank of each node posts the ends of processes that died without a
message.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import Activity, RankState, Report
from accelerate.state import StoreChannel, as_dataclass

STORE_TIMEOUT = timedelta(seconds=5)
"""Timeout of a request to the store that waits for a value."""
_PID_NAMESPACE_LINK = Path("/proc/self/ns/pid")
_POLL_INTERVAL = 0.1
_COUNTER = "events"
_REPORTED, _ASKED = 1 << 20, 1 << 41
"""Units of the counts of reports and inquiries in the counter, in which the unit of ended ranks is 1."""


@dataclass(frozen=True)
class Identity:
    """Identity of a process, by which other processes of its node find it."""

    host: str
    pid_namespace: str  # differs between nodes, and between containers on them
    pid: int
    start_time: float  # of the process, as reported by the operating system


@dataclass(frozen=True)
class RankIdentity(Identity):
    """Identity of the process of a rank."""

    rank: int


@dataclass(frozen=True)
class RankEnd:
    """End of a rank, described as text that follows "has"."""

    rank: int
    text: str


@dataclass(frozen=True)
class EventCounts:
    """Numbers of ended ranks, and of inquiries that were begun and reported."""

    ended: int = 0
    reported: int = 0
    asked: int = 0


def own_identity() -> Identity:
    pid_namespace = os.readlink(_PID_NAMESPACE_LINK) if _PID_NAMESPACE_LINK.exists() else ""
    return Identity(socket.gethostname(), pid_namespace, os.getpid(), psutil.Process().create_time())


def silent_state(rank: int, finding: str, host: str, pid: int) -> RankState:
    """Returns the state of a rank of this node that does not answer.

    Its description begins with `finding`, followed by the state of its process.
    """
    stack = processes.format_stack(processes.without_launcher_frames(processes.stack_of(pid)))
    text = f"{finding}: its process {pid} on {host} {processes.describe(pid)}"
    return RankState(rank, Activity.SILENT, ending=text, stack=stack, host=host, pid=pid)


class Peers:
    """Client of one rank for the exchange over the store, which posts its identity when it is created.

    `local_size` ranks run on its node. No other thread uses its connection to the store.
    """

    def __init__(
        self, channel: StoreChannel, rank: int, size: int, identity: Identity, local_size: int
    ) -> None:
        self.is_signed = channel.is_signed
        self.others = tuple(peer for peer in range(size) if peer != rank)
        self._channel, self._rank, self._local_size = channel, rank, local_size
        self._local_key = f"who/{identity.host}/{identity.pid_namespace}"
        self._identities: dict[int, Identity] = {rank: identity}
        self._local_identities: dict[int, Identity] = {}  # of ranks of this node
        self._num_checks, self._next_read = (
            0,
            1,
        )  # checks of this node, and the next one that reads identities
        self._events, self._endings, self._num_read = EventCounts(), dict[int, str](), 0
        own = asdict(RankIdentity(**asdict(identity), rank=rank))
        channel.append("who", own)
        channel.append(self._local_key, own)

    def wait_for_identities(self, seconds: float) -> None:
        """Waits until the other ranks have connected to the store and posted their identities."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self._read_identities("who")) <= len(self.others):
            time.sleep(_POLL_INTERVAL)

    def leave(self, ending: str) -> None:
        self._post_end(self._rank, ending)

    def events(self) -> EventCounts:
        """Reads the counter."""
        self._events = self._count(0)
        return self._events

    def ask(self, last: int) -> bool:
        """Begins the inquiry after number `last`, and returns whether this rank was the first to begin it."""
        if self._channel.decide(f"asked/{last + 1}", self._rank) != self._rank:
            return False
        self._count(_ASKED)
        return True

    def answer(self, number: int, state: RankState) -> None:
        self._channel.append(f"states/{number}", asdict(state))

    def answers(self, number: int) -> dict[int, RankState]:
        """Returns the states that ranks have posted for an inquiry."""
        states = (as_dataclass(RankState, state) for state in self._channel.read_list(f"states/{number}"))
        return {state.rank: state for state in states if state is not None}

    def announce(self, number: int, report: Report) -> None:
        self._channel.post(f"report/{number}", asdict(report))
        self._count(_REPORTED)
        self._channel.remove(f"states/{number}")

    def report(self, number: int) -> Report | None:
        return as_dataclass(Report, self._channel.read(f"report/{number}"))

    def is_first_to_report(self) -> bool:
        """Returns whether this is the first rank that reports why the run fails."""
        return bool(self._channel.decide("reported", self._rank) == self._rank)

    def confirm(self, number: int, num_ranks: int, seconds: float) -> None:
        """Posts that this rank has handled a report, and waits until `num_ranks` ranks have."""
        name = f"confirmed/{number}"
        if self._channel.count(name, 1) == num_ranks:
            self._channel.post(f"{name}/all", True)
        self._channel.wait([f"{name}/all"], seconds)

    def ended(self) -> dict[int, str]:
        """Returns the other ranks that have ended, with a description, as of the last read of the counter."""
        if self._events.ended > self._num_read:
            self._read_endings()
        return self._endings

    def check_local_processes(self, is_waiting: bool) -> None:
        """Posts the ends of processes of this node that died without a message.

        The lowest running rank of the node and each waiting rank do so.
        """
        self._read_local_identities()
        lower = (rank for rank in sorted(self._local_identities) if rank < self._rank)
        if not is_waiting and any(map(self._runs, lower)):
            return
        others = self._local_identities.keys() - self._endings.keys() - {self._rank}
        dead = [rank for rank in sorted(others) if not self._runs(rank)]
        if not dead:
            return
        self._read_endings()  # a rank may have posted its end before it died
        for rank in dead:
            if rank in self._endings:
                continue
            identity = self._local_identities[rank]
            self._endings[rank] = f"died without a message (process {identity.pid} on {identity.host})"
            if self._channel.decide(f"died/{rank}", self._rank) == self._rank:
                self._post_end(rank, self._endings[rank])

    def _runs(self, rank: int) -> bool:
        identity = self._local_identities[rank]
        return processes.runs(identity.pid, identity.start_time)

    def silent_states(self, ranks: Sequence[int]) -> list[RankState]:
        """Returns the states of ranks that do not answer."""
        if any(rank not in self._identities for rank in ranks):
            self._identities |= self._read_identities("who")
        return [self._silent_state(rank) for rank in ranks]

    def _silent_state(self, rank: int) -> RankState:
        identity = self._identities.get(rank)
        host, pid = (identity.host, identity.pid) if identity else ("", 0)
        if rank in self._endings:
            return RankState(rank, Activity.ENDED, ending=self._endings[rank], host=host, pid=pid)
        if rank in self._local_identities:
            return silent_state(rank, "runs but gives no answer", host, pid)
        text = f"gives no answer (process {pid} on {host}): it, its machine or the way to it is lost"
        if identity is None:
            text = "has built no Accelerator yet, or none that watches for hangs"
        return RankState(rank, Activity.SILENT, ending=text, host=host, pid=pid)

    def _count(self, increment: int) -> EventCounts:
        number = self._channel.count(_COUNTER, increment)
        return EventCounts(number % _REPORTED, number % _ASKED // _REPORTED, number // _ASKED)

    def _post_end(self, rank: int, text: str) -> None:
        self._channel.append("ended", asdict(RankEnd(rank, text)))
        self._count(1)

    def _read_endings(self) -> None:
        self._num_read = self._events.ended
        ends = (as_dataclass(RankEnd, end) for end in self._channel.read_list("ended"))
        posted = {end.rank: end.text for end in ends if end is not None and end.rank != self._rank}
        self._endings = {**self._endings, **posted}

    def _read_local_identities(self) -> None:
        """Reads the identities of the ranks of this node until all have posted theirs.

        The intervals grow, because some ranks may never post one.
        """
        self._num_checks += 1
        if len(self._local_identities) < self._local_size and self._num_checks >= self._next_read:
            self._next_read = 2 * self._num_checks
            self._local_identities = self._read_identities(self._local_key)
            self._identities |= self._local_identities

    def _read_identities(self, name: str) -> dict[int, Identity]:
        posted = (as_dataclass(RankIdentity, value) for value in self._channel.read_list(name))
        return {identity.rank: identity for identity in posted if identity is not None}
