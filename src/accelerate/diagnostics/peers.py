"""What ranks exchange about hangs over the store, and whether the other ranks still run.

One counter says how many ranks have ended, and how many inquiries were begun and reported. A rank reads it
with one request, and reads lists only when it has moved. Inquiries are numbered: whoever raises the number
asks, the other ranks append their states to one list, and the rank that asked posts the report. The lowest
rank of each machine that runs posts the ends of processes that died without a message.
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
from accelerate.diagnostics.hang_report import Doing, RankState, Report
from accelerate.state import StoreChannel, as_dataclass

PATIENCE = timedelta(seconds=5)
"""How long a request to the store may wait for a value."""
_SPACE = Path("/proc/self/ns/pid")
_PAUSE = 0.1
_COUNTER = "events"
_REPORTED, _ASKED = 1 << 20, 1 << 41
"""Units of the counts of reports and inquiries in the counter; ends count by 1."""


@dataclass(frozen=True)
class Identity:
    """How a process is found by others on its machine."""

    host: str
    space: str  # differs between machines, and between containers on them
    pid: int
    born: float  # when the process was started, as the operating system says


@dataclass(frozen=True)
class Introduction(Identity):
    """The identity of a rank."""

    rank: int


@dataclass(frozen=True)
class End:
    """How a rank has ended, as what follows "has"."""

    rank: int
    text: str


@dataclass(frozen=True)
class Events:
    """How many ranks have ended, and how many inquiries were begun and reported."""

    ended: int = 0
    reported: int = 0
    asked: int = 0


def own_identity() -> Identity:
    space = os.readlink(_SPACE) if _SPACE.exists() else ""
    return Identity(socket.gethostname(), space, os.getpid(), psutil.Process().create_time())


def silent_state(rank: int, seen: str, host: str, pid: int) -> RankState:
    """Describe a process of this machine that does not answer, after what is `seen` of it."""
    stack = processes.spell_stack(processes.without_runners(processes.stack_of(pid)))
    text = f"{seen}: its process {pid} on {host} {processes.describe(pid)}"
    return RankState(rank, Doing.SILENT, ending=text, stack=stack, host=host, pid=pid)


class Peers:
    """What one rank posts for the others, its identity first, and what it reads and sees of them.

    `local_size` ranks share its machine. No other thread uses its connection.
    """

    def __init__(self, channel: StoreChannel, rank: int, size: int, own: Identity, local_size: int) -> None:
        self.is_signed = channel.is_signed
        self.others = tuple(peer for peer in range(size) if peer != rank)
        self._channel, self._rank, self._local_size = channel, rank, local_size
        self._machine = f"who/{own.host}/{own.space}"
        self._identities: dict[int, Identity] = {rank: own}
        self._siblings: dict[int, Identity] = {}  # ranks of this machine
        self._looks, self._next_look = 0, 1  # for ranks of this machine that come later
        self._events, self._endings, self._num_read = Events(), dict[int, str](), 0
        introduction = asdict(Introduction(**asdict(own), rank=rank))
        channel.append("who", introduction)
        channel.append(self._machine, introduction)

    def wait_for_identities(self, seconds: float) -> None:
        """Wait until the other ranks have posted their identities, which is when they have connected."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self._read_identities("who")) <= len(self.others):
            time.sleep(_PAUSE)

    def leave(self, ending: str) -> None:
        self._post_end(self._rank, ending)

    def events(self) -> Events:
        """Read the counter."""
        self._events = self._count(0)
        return self._events

    def ask(self, last: int) -> bool:
        """Begin the inquiry after `last`; whether this rank was the first to do so."""
        if self._channel.decide(f"asked/{last + 1}", self._rank) != self._rank:
            return False
        self._count(_ASKED)
        return True

    def answer(self, number: int, state: RankState) -> None:
        self._channel.append(f"states/{number}", asdict(state))

    def answers(self, number: int) -> dict[int, RankState]:
        """The states that have been posted for an inquiry."""
        states = (as_dataclass(RankState, state) for state in self._channel.read_list(f"states/{number}"))
        return {state.rank: state for state in states if state is not None}

    def announce(self, number: int, report: Report) -> None:
        self._channel.post(f"report/{number}", asdict(report))
        self._count(_REPORTED)
        self._channel.remove(f"states/{number}")

    def report(self, number: int) -> Report | None:
        return as_dataclass(Report, self._channel.read(f"report/{number}"))

    def is_first_to_report(self) -> bool:
        """Whether no other rank has reported yet why the run fails."""
        return bool(self._channel.decide("reported", self._rank) == self._rank)

    def confirm(self, number: int, wanted: int, seconds: float) -> None:
        """Post that this rank has done what a report demands, and wait until `wanted` ranks have."""
        name = f"confirmed/{number}"
        if self._channel.count(name, 1) == wanted:
            self._channel.post(f"{name}/all", True)
        self._channel.wait([f"{name}/all"], seconds)

    def ended(self) -> dict[int, str]:
        """The other ranks that have ended, each with how, as of the last look at the counter."""
        if self._events.ended > self._num_read:
            self._read_endings()
        return self._endings

    def look_at_machine(self, is_waiting: bool) -> None:
        """Post the ends of processes of this machine that died without a message.

        The lowest rank of the machine that runs does so, and each that waits itself.
        """
        self._meet_siblings()
        lower = (rank for rank in sorted(self._siblings) if rank < self._rank)
        if not is_waiting and any(map(self._runs, lower)):
            return
        others = self._siblings.keys() - self._endings.keys() - {self._rank}
        unknown = [rank for rank in sorted(others) if not self._runs(rank)]
        if not unknown:
            return
        self._read_endings()  # it may have posted its end before
        for rank in unknown:
            if rank in self._endings:
                continue
            who = self._siblings[rank]
            self._endings[rank] = f"died without a message (process {who.pid} on {who.host})"
            if self._channel.decide(f"died/{rank}", self._rank) == self._rank:
                self._post_end(rank, self._endings[rank])

    def _runs(self, rank: int) -> bool:
        who = self._siblings[rank]
        return processes.runs(who.pid, who.born)

    def silent_states(self, ranks: Sequence[int]) -> list[RankState]:
        """Describe ranks that do not answer."""
        if any(rank not in self._identities for rank in ranks):
            self._identities |= self._read_identities("who")
        return [self._silent_state(rank) for rank in ranks]

    def _silent_state(self, rank: int) -> RankState:
        who = self._identities.get(rank)
        host, pid = (who.host, who.pid) if who else ("", 0)
        if rank in self._endings:
            return RankState(rank, Doing.ENDED, ending=self._endings[rank], host=host, pid=pid)
        if rank in self._siblings:
            return silent_state(rank, "runs but gives no answer", host, pid)
        text = f"gives no answer (process {pid} on {host}): it, its machine or the way to it is lost"
        if who is None:
            text = "has built no Accelerator yet, or none that watches for hangs"
        return RankState(rank, Doing.SILENT, ending=text, host=host, pid=pid)

    def _count(self, more: int) -> Events:
        number = self._channel.count(_COUNTER, more)
        return Events(number % _REPORTED, number % _ASKED // _REPORTED, number // _ASKED)

    def _post_end(self, rank: int, text: str) -> None:
        self._channel.append("ended", asdict(End(rank, text)))
        self._count(1)

    def _read_endings(self) -> None:
        self._num_read = self._events.ended
        ends = (as_dataclass(End, end) for end in self._channel.read_list("ended"))
        posted = {end.rank: end.text for end in ends if end is not None and end.rank != self._rank}
        self._endings = {**self._endings, **posted}

    def _meet_siblings(self) -> None:
        """Read who shares this machine until all have come; ever more seldom, as some may never come."""
        self._looks += 1
        if len(self._siblings) < self._local_size and self._looks >= self._next_look:
            self._next_look = 2 * self._looks
            self._siblings = self._read_identities(self._machine)
            self._identities |= self._siblings

    def _read_identities(self, name: str) -> dict[int, Identity]:
        posted = (as_dataclass(Introduction, value) for value in self._channel.read_list(name))
        return {who.rank: who for who in posted if who is not None}
