"""Signals that are noted for later, where the training loop asks for them.

Handlers are set when the first question is asked, and taken back at the end. The handler that was there
before is called as well. A second SIGTERM is not noted: it does what it did before. So is no signal in a fork
of this process: whoever ends its own helpers with SIGTERM means it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from accelerate.diagnostics.stop import SIGNALS, Trigger
from accelerate.launch import NOTES
from accelerate.logging import get_logger

logger = get_logger(__name__)

SECONDS_ALIKE = 2.0
"""One request may come twice, from a launcher and to the whole process group: within this time it is one."""

_AGENT = "torch.distributed.elastic"


class SignalNotes:
    """The signals that this process got.

    Args:
        clock: gives the time.
    """

    _installed: list[SignalNotes] = []  # handlers are one per process

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._triggers = {
            getattr(signal, trigger.name): trigger for trigger in SIGNALS if hasattr(signal, trigger.name)
        }
        self._noted: set[Trigger] = set()
        self._before: dict[int, Any] = {}
        self._first_end: float | None = None
        self._process = 0

    def install(self) -> None:
        """Note signals from here on, and those that came while the script was starting.

        Those of an earlier run in this process are noted no more.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "should_stop and should_save are asked for in a thread, where Python cannot watch signals: "
                "only time and files count. Ask for them in the main thread first.",
                main_process_only=False,
            )
            return
        for other in list(self._installed):
            other.restore()
        for number in self._triggers:
            if signal.getsignal(number) is not None:  # None: set by a library in C, and lost if replaced
                self._before[number] = signal.signal(number, self._note)
        self._noted |= {self._triggers[number] for number in NOTES.take()}
        self._installed.append(self)
        self._process = os.getpid()

    def restore(self) -> None:
        """Bring back the handlers that were there before, where ours are still in place."""
        if self not in self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed.remove(self)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        self._before.clear()

    def take(self) -> set[Trigger]:
        """Return what was noted since the last call."""
        noted, self._noted = self._noted, set()
        return noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_fork = os.getpid() != self._process
        if is_fork or (number == signal.SIGTERM and self._is_second()):
            self.restore()
            signal.raise_signal(number)
            return
        self._noted.add(self._triggers[number])
        before = self._before.get(number)
        if callable(before) and before != NOTES.note and not _belongs_to_agent(before):
            before(number, frame)

    def _is_second(self) -> bool:
        now = self._clock()
        if self._first_end is None:
            self._first_end = now
        return now - self._first_end > SECONDS_ALIKE


def _belongs_to_agent(handler: Any) -> bool:
    """Whether a handler is that of torch's agent: a process forked from it inherits it, and is not meant."""
    return str(getattr(handler, "__module__", "")).startswith(_AGENT)
