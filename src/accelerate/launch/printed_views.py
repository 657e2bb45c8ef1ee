"""Views of a run that `accelerate launch --monitor` prints to standard error during the run.

The ranks keep the streams of the launcher, so their output is never changed, delayed or reordered. A thread
of the launcher reads the records and writes each view in one piece, without moving the cursor.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from accelerate.base import environ, require
from accelerate.launch.children import blocked, say
from accelerate.launch.plan import LaunchPlan
from accelerate.monitoring import RECORDS_VARIABLE, RunReader, RunView, recorded_paths, render

INTERVAL = 30.0
"""Seconds between two views."""
DEFAULT_WIDTH = 100
"""Width of a view if standard error is no terminal, or one that reports 0 columns."""


@contextmanager
def printed_views(plan: LaunchPlan, folder: Path, title: str) -> Iterator[LaunchPlan]:
    """Prints views of a run while the block runs it, and yields a plan whose ranks write records.

    Args:
        folder: Folder of the launch, which has the paths of the records. Ranks without a folder for their
            records write them to the state folder of the user.

    Raises:
        MissingPackageError: rich is not installed.
    """
    require("rich", "--monitor")
    reader = RunReader(title, lambda: recorded_paths(folder), plan.local_processes)
    ended = threading.Event()
    thread = threading.Thread(target=_print_until, args=(ended, reader), name="accelerate-view", daemon=True)
    with blocked(signal.valid_signals()):  # the main thread handles all signals
        thread.start()
    try:
        added = {} if RECORDS_VARIABLE in environ.current() else {RECORDS_VARIABLE: "yes"}
        yield replace(plan, environment={**added, **plan.environment})
    finally:
        ended.set()
        thread.join()


def _print_until(ended: threading.Event, reader: RunReader) -> None:
    """Prints a view at each interval, and a last one at the end of the run."""
    try:
        is_over = False
        while not is_over:
            is_over = ended.wait(INTERVAL)
            view = reader.read()
            if view.ranks:
                _print(view)
    except Exception as error:
        say(f"the view has ended: {type(error).__name__}: {error}")


def _print(view: RunView) -> None:
    from rich.console import Console

    text = io.StringIO()
    is_terminal = os.isatty(2)
    columns = os.get_terminal_size(2).columns if is_terminal else 0
    width = columns or DEFAULT_WIDTH
    Console(file=text, force_terminal=is_terminal, width=width, legacy_windows=False).print(render(view))
    sys.stderr.flush()
    os.write(2, b"\n" + text.getvalue().encode(errors="replace"))
