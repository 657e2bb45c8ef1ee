"""What the ranks tell each other about hangs, over the store of the process group and not over its wire.

Inquiries are numbered. Whoever raises the number asks; every rank posts its state under that number, and the
one that asked posts the report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from accelerate.diagnostics.hang_report import RankState
from accelerate.state import process_group

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
    answered: tuple[int, ...]
    ended: tuple[int, ...]


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


class Bulletin:
    """One rank's view of the common board.

    Args:
        store: a connection that no other thread uses.
        rank: of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def introduce(self, identity: Identity) -> None:
        """Say how this process is found."""
        self._set(f"who/{self._rank}", asdict(identity))

    def identity(self, rank: int) -> Identity | None:
        """How another process is found; None when it has not said it."""
        found = self._get(f"who/{rank}")
        return None if found is None else Identity(**found)

    def leave(self, ending: str) -> None:
        """Say that this process ends, and how."""
        self._set(f"end/{self._rank}", ending)

    def ending(self, rank: int) -> str | None:
        """How another process has ended; None when it has not said so."""
        found: str | None = self._get(f"end/{rank}")
        return found

    def inquiry(self) -> int:
        """The number of the last inquiry; 0 when there was none."""
        return int(self._store.add("inquiry", 0))

    def ask(self, last: int) -> bool:
        """Begin the inquiry after `last`; whether this rank was the first to do so."""
        mine = f"{last + 1} {self._rank}"
        if self._store.compare_set(f"asked/{last + 1}", "", mine).decode() != mine:
            return False
        self._store.add("inquiry", 1)
        return True

    def answer(self, number: int, state: RankState) -> None:
        """Post the state of this rank for an inquiry."""
        self._set(f"state/{number}/{self._rank}", asdict(state))

    def answers(self, number: int, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states that have been posted for an inquiry, among those of `ranks`."""
        found = {rank: self._get(f"state/{number}/{rank}") for rank in ranks}
        return {rank: RankState(**state) for rank, state in found.items() if state is not None}

    def announce(self, number: int, report: Report) -> None:
        """Post what an inquiry found."""
        self._set(f"report/{number}", asdict(report))

    def report(self, number: int) -> Report | None:
        """What an inquiry found; None as long as it lasts."""
        found = self._get(f"report/{number}")
        if found is None:
            return None
        return Report(**{**found, "answered": tuple(found["answered"]), "ended": tuple(found["ended"])})

    def is_first_to_tell(self) -> bool:
        """Whether no other rank has told yet why the run fails."""
        mine = json.dumps(self._rank)
        return bool(self._store.compare_set("told", "", mine).decode() == mine)

    def sign(self, number: int) -> int:
        """Say that this rank has done what a report demands; how many have by now."""
        return int(self._store.add(f"signed/{number}", 1))

    def signed(self, number: int) -> int:
        """How many ranks have signed a report."""
        return int(self._store.add(f"signed/{number}", 0))

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def connect() -> Store | None:
    """Open a connection of its own to the store of the default group; None where there is no such store."""
    store = process_group.connect_store("hangs")
    if store is not None:
        store.set_timeout(PATIENCE)
    return store
