"""One process: say what the workers of a loader do when it waits long for a batch.

With several processes the watcher of each rank does that too. Here a thread watches each pass over a loader
with workers, and ends with it. It takes no lock, so a process that is forked meanwhile inherits none that is
held.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from typing import Any

from accelerate import torch_private
from accelerate.diagnostics import loading, stacks
from accelerate.diagnostics.hang_channel import Report
from accelerate.diagnostics.hang_outlet import Outlet
from accelerate.diagnostics.hang_report import DATA, RankState, compose
from accelerate.diagnostics.watchdog import GROWTH, Limits


class LoaderWatch:
    """Follows the passes over loaders with workers.

    Args:
        limits: after how many seconds a wait is told of.
        outlet: where that is written.
    """

    def __init__(self, limits: Limits, outlet: Outlet) -> None:
        self._limits = limits
        self._outlet = outlet

    def follow(self, iterator: Any) -> None:
        """Watch a pass until its iterator is gone; called by the thread that waits for its batches.

        Args:
            iterator: torch's, with workers.
        """
        over: list[bool] = []
        weakref.finalize(iterator, over.append, True)
        watch = _Pass(torch_private.loader_workers(iterator)[0].pid, self._limits, self._outlet, over)
        threading.Thread(target=watch.run, name="accelerate-loader", daemon=True).start()


class _Pass:
    """One pass; nothing here holds its iterator."""

    def __init__(self, worker: int, limits: Limits, outlet: Outlet, over: list[bool]) -> None:
        self._worker = worker
        self._limits = limits
        self._outlet = outlet
        self._over = over
        self._thread = threading.get_ident()
        self._token: object = None
        self._since = 0.0
        self._limit = limits.seconds
        self._told = False

    def run(self) -> None:
        """Look from time to time, until the pass is over."""
        while not self._over:
            time.sleep(self._limits.pause)
            self._look()

    def _look(self) -> None:
        frame = stacks.innermost(self._thread)
        wait = loading.find_wait(frame)
        if frame is None or wait is None or wait.token[0] != self._worker:
            self._change(None)
            return
        self._change(wait.token)
        seconds = time.monotonic() - self._since
        if seconds >= self._limit:
            self._limit = seconds * GROWTH  # a loader that is slow at each batch is not told of each time
            self._tell(wait, stacks.read_position(frame), seconds)

    def _change(self, token: object) -> None:
        if token == self._token:
            return
        self._token, self._since = token, time.monotonic()
        if self._told:
            self._outlet.withdraw("accelerate: the batch has come.")
            self._told = False

    def _tell(self, wait: loading.BatchWait, position: stacks.Position, seconds: float) -> None:
        state = RankState(
            0,
            DATA,
            file=position.file,
            line=position.line,
            seconds=seconds,
            details=loading.describe(wait),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        text = compose([state], os.getcwd())
        self._outlet.publish(Report(text, 0, ends=False, moment=time.time(), answered=[0], ended=[]))
        self._told = True
