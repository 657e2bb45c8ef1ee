"""The ranks that torch's elastic agent starts on this machine: what reaches them, and how they are ended.

The agent asks its processes to end and waits: for a stopped one, which cannot answer, as for one that saves.
So they are ended here instead; the agent is left with what nothing but SIGKILL ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from accelerate.base import spell_ranks
from accelerate.launch.children import continue_stopped, grace, ignored_for_good, say
from accelerate.launch.failures import Exits, collect
from accelerate.launch.first_failure import Kind, find_first
from accelerate.launch.pending_signals import REQUESTS, blocked

POLL = 0.05
SECONDS_FOR_CAUSE = 2.0
"""How long ranks may go on when one has failed as it lost another: that one may still write down why."""


class Context(Protocol):
    """What is used of torch's `SubprocessContext`: both by the number of the process on this machine."""

    @property
    def subprocess_handlers(self) -> Mapping[int, Any]:
        """What torch holds of each process."""

    @property
    def envs(self) -> Mapping[int, Mapping[str, str]]:
        """The variables of each process, `RANK` among them."""


class Ranks:
    """The processes of one launch; a restart replaces them.

    Args:
        folder: where they write down what ends them; `None` where they do not, since they are not our entry.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._context: Context | None = None
        self._attempt = 0
        self._early: list[int] = []
        self._ignored = ignored_for_good()
        self._asked: tuple[int, ...] = ()
        self._asked_by = int(signal.SIGTERM)
        self._asked_at = 0.0
        self._killed: tuple[int, ...] = ()

    def on_request(self, number: int, frame: FrameType | None) -> None:
        """Pass a request on to all ranks; one that comes before they are started, when they are."""
        name = signal.Signals(number).name
        reached = self._running()
        if self._asked or not reached:
            self._early.append(number)
            say(f"{name} received: no process runs now, so it is passed on to those that are started next")
            return
        for handle in reached.values():
            handle.proc.send_signal(number)
        say(f"{name} received and passed on to {len(reached)} process{'' if len(reached) == 1 else 'es'}")

    def start(self, context: Context, start: Callable[[], None]) -> None:
        """Start the processes.

        Args:
            context: of the agent.
            start: starts them.
        """
        for number in self._ignored:
            if signal.getsignal(number) != signal.SIG_IGN:  # the agent has just set a handler of its own
                signal.signal(number, signal.SIG_IGN)
        with blocked(REQUESTS if self._folder is not None else ()):
            start()
            self._context = context
            self._attempt = int(context.envs[0]["TORCHELASTIC_RESTART_COUNT"])
            self._asked = self._killed = ()
        while self._early:
            self.on_request(self._early.pop(0), None)

    def end(self, number: int) -> None:
        """Ask all that run to end, and wait for them; those that are left when the time is up are noted.

        Args:
            number: of the signal that asks them.
        """
        self._wait_for_cause()
        running = self._running()
        if not running:
            return
        if not self._asked:
            self._asked, self._asked_by, self._asked_at = tuple(running), number, time.time()
        for handle in running.values():
            handle.close(death_sig=signal.Signals(number))
        seconds = grace()
        deadline = time.monotonic() + seconds
        while (running := self._running()) and time.monotonic() < deadline:
            continue_stopped([handle.proc.pid for handle in running.values()], os.killpg)
            time.sleep(POLL)
        self._killed = tuple(running)
        if running:
            late = f"{spell_ranks(list(running))} did not end within {seconds} s after"
            say(f"{late} {signal.Signals(number).name} and {'is' if len(running) == 1 else 'are'} killed")

    def exits(self) -> Exits:
        """What was seen of the processes."""
        codes = {rank: handle.proc.poll() for rank, handle in self._handles().items()}
        return Exits(
            {rank: code for rank, code in codes.items() if code is not None},
            self._attempt,
            self._asked,
            self._asked_by,
            self._asked_at,
            self._killed,
        )

    def _wait_for_cause(self) -> None:
        """Give ranks some time where all that failed did so for another one, or the first one still ends."""
        deadline = time.monotonic() + SECONDS_FOR_CAUSE
        while self._folder is not None and self._running() and time.monotonic() < deadline:
            first = find_first(replace(collect(self._folder, 1), seen=self.exits()))
            if first is None or (first.kind <= Kind.SILENT and first.rank not in self._running()):
                return
            time.sleep(POLL)

    def _handles(self) -> dict[int, Any]:
        """Rank -> what torch holds of its process."""
        context = self._context
        if context is None:
            return {}
        return {int(context.envs[at]["RANK"]): each for at, each in context.subprocess_handlers.items()}

    def _running(self) -> dict[int, Any]:
        return {rank: handle for rank, handle in self._handles().items() if handle.proc.poll() is None}
