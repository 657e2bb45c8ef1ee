"""Python stacks of other processes on this node, which the processes write on a signal.

Ranks and loader workers call `offer`, and hang reports call `ask`. A process that offers its stack registers
`faulthandler` to write it into a file in memory. That works while the process is blocked in C code, or while
another thread holds the interpreter lock. Forked processes inherit the registration. Processes offer their
stack on Linux only.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 0.5
"""Timeout for a process to write its stack, in seconds."""
_POLL = 0.01
_NAME = "accelerate-stack"
_THREAD = re.compile(r"^(?:Current thread|Thread|Stack) .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

_files: list[int] = []

Frame = tuple[str, int, str]
"""File, line number and function name."""


def signal_numbers() -> tuple[int, ...]:
    """Returns the signals that request the stack of the main thread and those of all threads.

    They are real-time signals, which systems reserve for programs. The tuple is empty on other systems.
    """
    last = getattr(signal, "SIGRTMAX", None)
    return () if last is None or not hasattr(os, "memfd_create") else (int(last) - 3, int(last) - 4)


def offer() -> bool:
    """Registers this process to write its stack on request, and returns whether it is registered.

    A second call has no effect. A process that uses the signals itself is not registered.
    """
    signals, pid = signal_numbers(), os.getpid()
    if _files or not signals or not hasattr(os, "memfd_create") or not hasattr(faulthandler, "register"):
        return bool(_files)
    used = _mask(pid, "SigCgt") | _mask(pid, "SigIgn") | _mask(pid, "SigBlk")
    if any(used >> (number - 1) & 1 for number in signals):
        return False
    _files.append(os.memfd_create(_NAME))
    for number, is_for_all in zip(signals, (False, True), strict=True):
        faulthandler.register(number, file=_files[0], all_threads=is_for_all, chain=False)
    return True


def offer_in_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Offers the stack of a worker that is not forked, and calls the `worker_init_fn` of the user."""
    offer()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def offers(pid: int) -> bool:
    """Returns whether a process offers its stack."""
    return _find_file(pid) is not None


def ask(pid: int, timeout: float = TIMEOUT) -> list[Frame]:
    """Returns the frames of the main thread of a process, the innermost last.

    The list is empty if the process offers no stack, has ended, or does not answer within the timeout.
    """
    return next(iter(_request(pid, 0, timeout)), [])


def ask_all(pid: int, timeout: float = TIMEOUT) -> list[list[Frame]]:
    """Returns the frames of all threads of a process.

    The frames of threads that run may change while they are written.
    """
    return _request(pid, 1, timeout)


def _request(pid: int, signal_index: int, timeout: float) -> list[list[Frame]]:
    file = _find_file(pid)
    if file is None:
        return []
    try:
        before = os.stat(file).st_size
        os.kill(pid, signal_numbers()[signal_index])
        _wait_for_more(file, before, timeout)
        text = Path(file).read_bytes()[before:].decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return []
    threads = [_FRAME.findall(part) for part in _THREAD.split(text)[1:]]
    return [[(path, int(line), name) for path, line, name in reversed(frames)] for frames in threads]


def _wait_for_more(file: str, before: int, timeout: float) -> None:
    """Waits until the file has grown and its size no longer changes."""
    deadline, last = time.monotonic() + timeout, before
    while time.monotonic() < deadline:
        time.sleep(_POLL)
        size = os.stat(file).st_size
        if before < size == last:
            return
        last = size


def _find_file(pid: int) -> str | None:
    """Returns the path of the file of a process for its stack, or None if it does not handle the signals."""
    signals, folder = signal_numbers(), f"/proc/{pid}/fd"
    if not signals:
        return None
    try:
        caught = _mask(pid, "SigCgt")
        if not all(caught >> (number - 1) & 1 for number in signals):
            return None
        links = {f"{folder}/{name}": _link(f"{folder}/{name}") for name in os.listdir(folder)}
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        # the process has ended, or belongs to another user
        return None
    return next((path for path, link in links.items() if link.startswith(f"/memfd:{_NAME} ")), None)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed in the meantime
        return ""


def _mask(pid: int, name: str) -> int:
    """Returns a signal mask of a process from /proc, or 0 if it is not listed."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    match = re.search(rf"^{name}:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return 0 if match is None else int(match[1], 16)
