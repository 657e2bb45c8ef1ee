"""What ranks exchange about hangs over the store, and whether the other ranks still run.

Inquiries are numbered. Whoever raises the number asks; every rank posts its state under that number, and the
one that asked posts the report.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import Doing, RankState, Report
from accelerate.state import StoreChannel, as_dataclass

PATIENCE = timedelta(seconds=5)
"""How long a request to the store may take."""
_SPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Identity:
    """How a process is found by others on its machine."""

    host: str
    space: str  # differs between machines, and between containers on them
    pid: int
    born: float  # when the process was started, as the operating system says


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

    No other thread uses its connection.
    """

    def __init__(self, channel: StoreChannel, rank: int, size: int, own: Identity) -> None:
        self.is_signed = channel.is_signed
        self.others = tuple(peer for peer in range(size) if peer != rank)
        self._channel, self._rank, self._own = channel, rank, own
        self._identities: dict[int, Identity] = {}
        channel.post(f"who/{rank}", asdict(own))

    def wait_for_identities(self, seconds: float) -> None:
        """Wait until the other ranks have posted their identities, which is when they have connected."""
        self._channel.gather("who", self.others, seconds)

    def leave(self, ending: str) -> None:
        self._channel.post(f"end/{self._rank}", ending)

    def inquiry(self) -> int:
        """The number of the last inquiry; 0 when there was none."""
        return self._channel.count("inquiry")

    def ask(self, last: int) -> bool:
        """Begin the inquiry after `last`; whether this rank was the first to do so."""
        if self._channel.decide(f"asked/{last + 1}", self._rank) != self._rank:
            return False
        self._channel.count("inquiry", 1)
        return True

    def answer(self, number: int, state: RankState) -> None:
        self._channel.post(f"state/{number}/{self._rank}", asdict(state))

    def answers(self, number: int, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states that have been posted for an inquiry, among those of `ranks`."""
        posted = self._channel.gather(f"state/{number}", ranks, 0.0)
        states = {rank: as_dataclass(RankState, state) for rank, state in posted.items()}
        return {rank: state for rank, state in states.items() if state is not None}

    def announce(self, number: int, report: Report) -> None:
        self._channel.post(f"report/{number}", asdict(report))

    def report(self, number: int) -> Report | None:
        return as_dataclass(Report, self._channel.read(f"report/{number}"))

    def is_first_to_report(self) -> bool:
        """Whether no other rank has reported yet why the run fails."""
        return bool(self._channel.decide("reported", self._rank) == self._rank)

    def confirm(self, number: int, more: int = 1) -> int:
        """Post that this rank has done what a report demands; how many have by now. With 0, only count."""
        return self._channel.count(f"confirmed/{number}", more)

    def ended(self) -> dict[int, str]:
        """The ranks that have ended, each with how, as what follows "has"."""
        endings = {rank: self.ending(rank) for rank in self.others}
        return {rank: text for rank, text in endings.items() if text is not None}

    def ending(self, rank: int) -> str | None:
        """How another rank has ended, as it posted or as this process sees; None while it may run."""
        posted = self._posted_ending(rank)
        if posted is not None:
            return posted
        who = self._identity(rank)
        if who is None or not self._is_on_this_machine(who) or processes.runs(who.pid, who.born):
            return None
        # It may have posted its end while its process was looked for.
        return self._posted_ending(rank) or f"died without a message (process {who.pid} on {who.host})"

    def silent_state(self, rank: int) -> RankState:
        who = self._identity(rank)
        host, pid = (who.host, who.pid) if who else ("", 0)
        ending = self.ending(rank)
        if ending is not None:
            return RankState(rank, Doing.ENDED, ending=ending, host=host, pid=pid)
        if who is not None and self._is_on_this_machine(who):
            return silent_state(rank, "runs but gives no answer", host, pid)
        text = f"gives no answer (process {pid} on {host}): it, its machine or the way to it is lost"
        if who is None:
            text = "has built no Accelerator yet, or none that watches for hangs"
        return RankState(rank, Doing.SILENT, ending=text, host=host, pid=pid)

    def _posted_ending(self, rank: int) -> str | None:
        ending = self._channel.read(f"end/{rank}")
        return ending if isinstance(ending, str) else None

    def _identity(self, rank: int) -> Identity | None:
        """The identity of another rank; None when it has not posted it."""
        if rank not in self._identities:
            who = as_dataclass(Identity, self._channel.read(f"who/{rank}"))
            self._identities |= {} if who is None else {rank: who}
        return self._identities.get(rank)

    def _is_on_this_machine(self, who: Identity) -> bool:
        return (who.host, who.space) == (self._own.host, self._own.space)
