"""What ranks exchange about hangs over the store, and what one of them knows of the others.

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

from accelerate.diagnostics import processes, stacks
from accelerate.diagnostics.hang_report import ENDED, SILENT, RankState, Report
from accelerate.state import StoreChannel, as_dataclass

PATIENCE = timedelta(seconds=5)
"""How long a request to the store may take."""
_SPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Identity:
    """How a process is found on its machine.

    Attributes:
        host: name of the machine.
        space: differs between machines, and between containers on them.
        pid: number of the process.
        born: when it was started, as the operating system says.
    """

    host: str
    space: str
    pid: int
    born: float


def own_identity() -> Identity:
    """How this process is found by others on its machine."""
    space = os.readlink(_SPACE) if _SPACE.exists() else ""
    return Identity(socket.gethostname(), space, os.getpid(), psutil.Process().create_time())


class HangChannel:
    """What one rank posts and reads.

    Args:
        channel: a connection that no other thread uses.
        rank: of this process.

    Attributes:
        is_signed: whether only ranks of this run can have written the values.
    """

    def __init__(self, channel: StoreChannel, rank: int) -> None:
        self.is_signed = channel.is_signed
        self._channel = channel
        self._rank = rank

    def introduce(self, identity: Identity) -> None:
        """Post how this process is found."""
        self._channel.post(f"who/{self._rank}", asdict(identity))

    def identity(self, rank: int) -> Identity | None:
        """How another process is found; None when it has not posted it."""
        return as_dataclass(Identity, self._channel.read(f"who/{rank}"))

    def wait_for_identities(self, ranks: Sequence[int], seconds: float) -> None:
        """Wait until other ranks have posted how they are found, which is when they have connected."""
        self._channel.gather("who", ranks, seconds)

    def leave(self, ending: str) -> None:
        """Post that this process ends, and how."""
        self._channel.post(f"end/{self._rank}", ending)

    def ending(self, rank: int) -> str | None:
        """How another process has ended; None when it has not posted it."""
        ending = self._channel.read(f"end/{rank}")
        return ending if isinstance(ending, str) else None

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
        """Post the state of this rank for an inquiry."""
        self._channel.post(f"state/{number}/{self._rank}", asdict(state))

    def answers(self, number: int, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states that have been posted for an inquiry, among those of `ranks`."""
        posted = self._channel.gather(f"state/{number}", ranks, 0.0)
        states = {rank: as_dataclass(RankState, state) for rank, state in posted.items()}
        return {rank: state for rank, state in states.items() if state is not None}

    def announce(self, number: int, report: Report) -> None:
        """Post the report of an inquiry."""
        self._channel.post(f"report/{number}", asdict(report))

    def report(self, number: int) -> Report | None:
        """The report of an inquiry; None as long as there is none."""
        return as_dataclass(Report, self._channel.read(f"report/{number}"))

    def is_first_to_tell(self) -> bool:
        """Whether no other rank has reported yet why the run fails."""
        return bool(self._channel.decide("reported", self._rank) == self._rank)

    def confirm(self, number: int) -> int:
        """Post that this rank has done what a report demands; how many have by now."""
        return self._channel.count(f"confirmed/{number}", 1)

    def confirmed(self, number: int) -> int:
        """How many ranks have done what a report demands."""
        return self._channel.count(f"confirmed/{number}")


class Peers:
    """Whether the other ranks of the run still run, as far as this one can see.

    Args:
        hang_channel: where they posted how they are found.
        own: identity of this process.
        ranks: of the others.
    """

    def __init__(self, hang_channel: HangChannel, own: Identity, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._hang_channel = hang_channel
        self._own = own
        self._identities: dict[int, Identity] = {}

    def ended(self) -> dict[int, str]:
        """The ranks that have ended, each with how, as what follows "has"."""
        endings = {rank: self._ending(rank) for rank in self.ranks}
        return {rank: text for rank, text in endings.items() if text is not None}

    def silent_state(self, rank: int) -> RankState:
        """Describe a rank that gave no answer."""
        who = self._identity(rank)
        host, pid = (who.host, who.pid) if who else ("", 0)
        ending = self._ending(rank)
        if ending is not None:
            return RankState(rank, ENDED, ending=ending, host=host, pid=pid)
        stack = ""
        if who is None:
            text = "has built no Accelerator yet, or none that watches for hangs"
        elif self._is_on_this_machine(who):
            text = f"lives but gives no answer: its process {pid} on {host} {processes.describe(pid)}"
            stack = processes.spell_stack(stacks.without_runners(processes.stack_of(pid)))
        else:
            text = f"gives no answer (process {pid} on {host}): it, its machine or the way to it is lost"
        return RankState(rank, SILENT, ending=text, stack=stack, host=host, pid=pid)

    def _ending(self, rank: int) -> str | None:
        posted = self._hang_channel.ending(rank)
        if posted is not None:
            return posted
        who = self._identity(rank)
        if who is None or not self._is_on_this_machine(who) or processes.runs(who.pid, who.born):
            return None
        # It may have posted its end while its process was looked for.
        return self._hang_channel.ending(rank) or f"died without a word (process {who.pid} on {who.host})"

    def _identity(self, rank: int) -> Identity | None:
        if rank not in self._identities and (who := self._hang_channel.identity(rank)) is not None:
            self._identities[rank] = who
        return self._identities.get(rank)

    def _is_on_this_machine(self, who: Identity) -> bool:
        return (who.host, who.space) == (self._own.host, self._own.space)
