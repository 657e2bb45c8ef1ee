"""Requests by signal to a process that still starts: blocked until its script begins, then noted for later.

By default SIGUSR1 and SIGUSR2 end a process. So the launcher starts its processes with both blocked, and the
entry unblocks them when it has set a handler. None is lost, and none ends a process that still imports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

REQUESTS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Signals that ask a program for something, and end one that has no handler."""

_CAN_BLOCK = hasattr(signal, "pthread_sigmask")


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals in this thread; a process that is started in the block begins with them blocked.

    Args:
        numbers: of the signals. Those that arrive meanwhile are delivered behind the block, unless another
            thread of this process takes them.
    """
    if not _CAN_BLOCK:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RequestNotes:
    """Notes the requests that reach this process before its script asks for them or sets handlers."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._process = 0

    def install(self) -> None:
        """Set the handler, and unblock the signals. Called once, in the main thread."""
        self._process = os.getpid()
        for number in REQUESTS:
            signal.signal(number, self.note)
        if _CAN_BLOCK:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; in a fork of this process it does what it does by default."""
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._noted.add(number)

    def take(self) -> set[int]:
        """Return the numbers that were noted since the last call."""
        noted, self._noted = self._noted, set()
        return noted


NOTES = RequestNotes()
"""Of this process: handlers are one per process."""
