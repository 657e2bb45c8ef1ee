"""End of a process together with the process that has started it."""

import ctypes
import os
import signal
import sys
import threading
import time

_DEATH_SIGNAL = 1
"""Option `PR_SET_PDEATHSIG` of prctl(2)."""
_SECONDS = 1.0
"""Seconds between two looks at the parent where the kernel sends no signal."""


def end_with_parent(parent: int | None) -> None:
    """Ends this process by SIGKILL when its parent has ended.

    On Linux, the kernel sends the signal when the thread that has started this process ends. On Windows,
    nothing is done, because a process keeps the id of a parent that has ended.

    Args:
        parent: Process id of the parent, or None, with which nothing is done.
    """
    if sys.platform != "win32" and parent is not None:
        first = os.getppid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        else:
            threading.Thread(target=_watch, args=(first,), daemon=True, name="parent").start()
        if not _exists(parent):  # it ended before
            _end()


def _watch(first: int) -> None:
    """Ends this process when it has another parent, since the id of an ended one may be in use again."""
    while os.getppid() == first:
        time.sleep(_SECONDS)
    _end()


def _end() -> None:
    if sys.platform != "win32":
        os.kill(os.getpid(), signal.SIGKILL)


def _exists(process: int) -> bool:
    """Returns whether a process exists, also one of another user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
