"""Where reports about hangs go: standard error, the folder of the launcher, the end of the process."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from accelerate.diagnostics.hang_channel import Report
from accelerate.launch import FOLDER_VARIABLE, HANG, HANG_KIND, Failure, count_of

EXIT_CODE = 1


class Outlet:
    """Where the reports of one rank go.

    Args:
        rank: of this process.
        size: number of processes.
        environ: says where the launcher collects failures, and how often it has started the group anew.
    """

    def __init__(self, rank: int, size: int, environ: Mapping[str, str]) -> None:
        self._rank = rank
        self._size = size
        self._attempt = count_of(environ, "TORCHELASTIC_RESTART_COUNT", 0)
        folder = environ.get(FOLDER_VARIABLE)
        self._folder = Path(folder) if folder else None

    def publish(self, report: Report) -> None:
        """Print a report, and keep it for the launcher."""
        self._say(report.text)
        if self._folder is not None and self._folder.is_dir():
            kept = {"text": report.text, "moment": report.moment, "attempt": self._attempt}
            (self._folder / HANG).write_text(json.dumps(kept), encoding="utf-8")

    def withdraw(self, text: str) -> None:
        """Print that a report no longer holds, and keep none."""
        self._say(text)
        if self._folder is not None:
            (self._folder / HANG).unlink(missing_ok=True)

    def prepare_end(self, report: Report) -> None:
        """Write down for the launcher that this process ends because of a report."""
        if self._folder is None:
            return
        headline = report.text.splitlines()[0].removeprefix("accelerate: ")
        Failure(
            rank=self._rank,
            world_size=self._size,
            attempt=self._attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            moment=report.moment,
            kind=(HANG_KIND,),
            headline=headline,
            trace=report.text,
            place="",
        ).write(self._folder)

    def end(self) -> None:
        """End this process at once: its main thread is blocked where no exception reaches it.

        Its daemons, such as the workers of a loader, end with it, as they do when Python ends by itself.
        """
        own = {process.pid for process in psutil.Process().children()}
        for child in multiprocessing.active_children():  # of a fork: those of its parent too
            if child.daemon and child.pid in own:
                child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    @staticmethod
    def _say(text: str) -> None:
        # Parts of it come from other processes: nothing in it may control the terminal.
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
        print(text, file=sys.stderr, flush=True)
