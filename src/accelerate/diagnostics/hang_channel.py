"""What the ranks tell each other about hangs, over the store of the process group and not over its wire.

Inquiries are numbered. Whoever raises the number asks; every rank posts its state under that number, and the
one that asked posts the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from accelerate.diagnostics.hang_report import RankState
from accelerate.state import StoreChannel, as_dataclass, rendezvous

PATIENCE = timedelta(seconds=5)
"""How long a request to the store may take."""


@dataclass(frozen=True)
class Report:
    """What an inquiry found.

    Attributes:
        text: for people.
        printer: rank that prints it.
        ends: whether all ranks end now.
        moment: seconds since the epoch at which it was made.
        answered: ranks that answered.
        ended: ranks that have ended.
    """

    text: str
    printer: int
    ends: bool
    moment: float
    answered: list[int]
    ended: list[int]


@dataclass(frozen=True)
class Identity:
    """How a process is found on its machine.

    Attributes:
        host: name of the machine.
        space: tells machines, and containers on them, apart.
        pid: number of the process.
        born: when it was started, as the operating system says.
    """

    host: str
    space: str
    pid: int
    born: float


class HangChannel:
    """One rank's view of the common board.

    Args:
        channel: a connection that no other thread uses.
        rank: of this process.

    Attributes:
        is_signed: whether what stands there was written by ranks of this run, and by nobody else.
    """

    def __init__(self, channel: StoreChannel, rank: int) -> None:
        self.is_signed = channel.is_signed
        self._channel = channel
        self._rank = rank

    def introduce(self, identity: Identity) -> None:
        """Say how this process is found."""
        self._channel.post(f"who/{self._rank}", asdict(identity))

    def identity(self, rank: int) -> Identity | None:
        """How another process is found; None when it has not said it."""
        return as_dataclass(Identity, self._channel.read(f"who/{rank}"))

    def leave(self, ending: str) -> None:
        """Say that this process ends, and how."""
        self._channel.post(f"end/{self._rank}", ending)

    def ending(self, rank: int) -> str | None:
        """How another process has ended; None when it has not said so."""
        found = self._channel.read(f"end/{rank}")
        return found if isinstance(found, str) else None

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
        found = {rank: self._channel.read(f"state/{number}/{rank}") for rank in ranks}
        states = {rank: as_dataclass(RankState, state) for rank, state in found.items()}
        return {rank: state for rank, state in states.items() if state is not None}

    def announce(self, number: int, report: Report) -> None:
        """Post what an inquiry found."""
        self._channel.post(f"report/{number}", asdict(report))

    def report(self, number: int) -> Report | None:
        """What an inquiry found; None as long as it lasts."""
        return as_dataclass(Report, self._channel.read(f"report/{number}"))

    def is_first_to_tell(self) -> bool:
        """Whether no other rank has told yet why the run fails."""
        return bool(self._channel.decide("told", self._rank) == self._rank)

    def confirm(self, number: int) -> int:
        """Say that this rank has done what a report demands; how many have by now."""
        return self._channel.count(f"confirmed/{number}", 1)

    def confirmed(self, number: int) -> int:
        """How many ranks have done what a report demands."""
        return self._channel.count(f"confirmed/{number}")


def connect() -> StoreChannel | None:
    """Open a connection of its own to the store of the default group; None where there is no such store."""
    return rendezvous.connect_channel("hangs", PATIENCE)
