"""The Python stack of another process of this machine, which writes it when it gets a signal.

A process that offers its stack lets `faulthandler` write it into a file in memory. That works while the
process is blocked in C code, or while another thread keeps the interpreter. Forked processes inherit the
offer. This needs Linux: on other systems no process offers its stack.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 0.5
"""Seconds in which a process that can write its stack has written it."""
_POLL = 0.01
_NAME = "accelerate-stack"
_THREAD = re.compile(r"^(?:Current thread|Thread|Stack) .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

_files: list[int] = []

Frame = tuple[str, int, str]
"""File, line and function."""


def numbers() -> tuple[int, ...]:
    """The signals that ask for the stack of the main thread, and for those of all threads.

    They are some that systems leave to programs; none where there are none.
    """
    last = getattr(signal, "SIGRTMAX", None)
    return () if last is None or not hasattr(os, "memfd_create") else (int(last) - 3, int(last) - 4)


def offer() -> bool:
    """Let other processes of this user ask for the stacks of this one; whether they can.

    Nothing happens a second time, or where the program uses the signals itself.
    """
    asking, pid = numbers(), os.getpid()
    if _files or not asking or not hasattr(os, "memfd_create") or not hasattr(faulthandler, "register"):
        return bool(_files)
    used = _mask(pid, "SigCgt") | _mask(pid, "SigIgn") | _mask(pid, "SigBlk")
    if any(used >> (number - 1) & 1 for number in asking):
        return False
    _files.append(os.memfd_create(_NAME))
    for number, is_for_all in zip(asking, (False, True), strict=True):
        faulthandler.register(number, file=_files[0], all_threads=is_for_all, chain=False)
    return True


def offer_in_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Offer the stack of a worker that is not forked, then call the user's `worker_init_fn`, if any."""
    offer()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def offers(pid: int) -> bool:
    """Whether a process can be asked for its stack."""
    return _find_file(pid) is not None


def ask(pid: int, patience: float = PATIENCE) -> list[Frame]:
    """Return the frames of the main thread of a process, the innermost last.

    There are none where the process offers no stack, ended, or did not answer in so many seconds.
    """
    return next(iter(_request(pid, 0, patience)), [])


def ask_all(pid: int, patience: float = PATIENCE) -> list[list[Frame]]:
    """Return the frames of all threads of a process that sleeps: those of running ones may change."""
    return _request(pid, 1, patience)


def _request(pid: int, which: int, patience: float) -> list[list[Frame]]:
    file = _find_file(pid)
    if file is None:
        return []
    try:
        before = os.stat(file).st_size
        os.kill(pid, numbers()[which])
        _wait_for_more(file, before, patience)
        text = Path(file).read_bytes()[before:].decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    threads = [_FRAME.findall(part) for part in _THREAD.split(text)[1:]]
    return [[(path, int(line), name) for path, line, name in reversed(frames)] for frames in threads]


def _wait_for_more(file: str, before: int, patience: float) -> None:
    """Wait until the file has grown, and grows no more."""
    deadline, last = time.monotonic() + patience, before
    while time.monotonic() < deadline:
        time.sleep(_POLL)
        size = os.stat(file).st_size
        if before < size == last:
            return
        last = size


def _find_file(pid: int) -> str | None:
    """The file a process writes its stack to; None where a signal would end it, or is taken otherwise."""
    asking, folder = numbers(), f"/proc/{pid}/fd"
    if not asking:
        return None
    try:
        caught = _mask(pid, "SigCgt")
        if not all(caught >> (number - 1) & 1 for number in asking):
            return None
        links = {f"{folder}/{name}": _link(f"{folder}/{name}") for name in os.listdir(folder)}
    except (FileNotFoundError, PermissionError, ProcessLookupError):  # it has ended, or is not ours to see
        return None
    return next((path for path, link in links.items() if link.startswith(f"/memfd:{_NAME} ")), None)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _mask(pid: int, name: str) -> int:
    """One of the signal masks of a process in /proc; 0 where it is not listed."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    match = re.search(rf"^{name}:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return 0 if match is None else int(match[1], 16)
