"""Whether the other processes of a run live, as far as this one can see."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from accelerate.diagnostics import process_view, stacks
from accelerate.diagnostics.hang_channel import HangChannel, Identity
from accelerate.diagnostics.hang_report import ENDED, SILENT, RankState

_SPACE = Path("/proc/self/ns/pid")


def own_identity() -> Identity:
    """How this process is found by others on its machine."""
    space = os.readlink(_SPACE) if _SPACE.exists() else ""
    return Identity(socket.gethostname(), space, os.getpid(), psutil.Process().create_time())


class Peers:
    """The other ranks of the run.

    Args:
        hang_channel: where they said who they are.
        own: identity of this process.
        ranks: of the others.
    """

    def __init__(self, hang_channel: HangChannel, own: Identity, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._hang_channel = hang_channel
        self._own = own
        self._known: dict[int, Identity] = {}

    def ended(self) -> dict[int, str]:
        """The ranks that have ended, each with how, as what follows "has"."""
        found = {rank: self._ending(rank) for rank in self.ranks}
        return {rank: text for rank, text in found.items() if text is not None}

    def silent_state(self, rank: int) -> RankState:
        """Describe a rank that gave no answer."""
        who = self._identity(rank)
        host, pid = (who.host, who.pid) if who else ("", 0)
        ending = self._ending(rank)
        if ending is not None:
            return RankState(rank, ENDED, ending=ending, host=host, pid=pid)
        if who is None:
            text = "has built no Accelerator yet, or none that watches for hangs"
        elif self._is_near(who):
            text = f"lives but gives no answer: its process {pid} on {host} {process_view.describe(pid)}"
            stack = process_view.spell_stack(stacks.without_runners(process_view.stack_of(pid)))
            return RankState(rank, SILENT, ending=text, stack=stack, host=host, pid=pid)
        else:
            text = f"gives no answer (process {pid} on {host}): it, its machine or the way to it is lost"
        return RankState(rank, SILENT, ending=text, host=host, pid=pid)

    def _ending(self, rank: int) -> str | None:
        said = self._hang_channel.ending(rank)
        if said is not None:
            return said
        who = self._identity(rank)
        if who is None or not self._is_near(who) or _lives(who):
            return None
        # What it said of its end may have come while its process was looked for.
        return self._hang_channel.ending(rank) or f"died without a word (process {who.pid} on {who.host})"

    def _identity(self, rank: int) -> Identity | None:
        if rank not in self._known and (who := self._hang_channel.identity(rank)) is not None:
            self._known[rank] = who
        return self._known.get(rank)

    def _is_near(self, who: Identity) -> bool:
        return (who.host, who.space) == (self._own.host, self._own.space)


def _lives(who: Identity) -> bool:
    try:
        process = psutil.Process(who.pid)
        return process.create_time() == who.born and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
