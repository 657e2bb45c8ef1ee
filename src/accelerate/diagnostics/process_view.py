"""What the operating system says of a process of this machine: it runs, sleeps, is stopped, or has ended."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path

import psutil

from accelerate.base import Frame, ask, ask_all

ENDED = "has ended"
_WORDS = {
    psutil.STATUS_RUNNING: "runs",
    psutil.STATUS_SLEEPING: "sleeps",
    psutil.STATUS_IDLE: "sleeps",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
    psutil.STATUS_STOPPED: "is stopped by a signal",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_ZOMBIE: ENDED,
    psutil.STATUS_DEAD: ENDED,
}
_ASKED = (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_IDLE)
"""Processes in these states can write their stack."""


def describe(pid: int) -> str:
    """Say what a process does, as what follows its name: "sleeps in hrtimer_nanosleep, 0.8 s of CPU time".

    Args:
        pid: number of the process.
    """
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            word, times = _WORDS.get(process.status(), process.status()), process.cpu_times()
    except psutil.NoSuchProcess:
        return ENDED
    if word == ENDED:
        return _spell_end(pid)
    place = _waits_in(pid) if word == _WORDS[psutil.STATUS_SLEEPING] else ""
    return f"{word}{place}, {times.user + times.system:.1f} s of CPU time"


def stack_of(pid: int) -> list[Frame]:
    """The Python stack of a process, the innermost frame last; empty where it cannot be had.

    Args:
        pid: number of the process.
    """
    return ask(pid) if _status(pid) in _ASKED else []


def stacks_of_all_threads(pid: int) -> list[list[Frame]]:
    """The Python stacks of the threads of a process that sleeps; none where they cannot be had.

    Args:
        pid: number of the process.
    """
    return ask_all(pid) if _status(pid) == psutil.STATUS_SLEEPING else []


def spell_stack(frames: Iterable[Frame]) -> str:
    """Write a stack as Python prints it.

    Args:
        frames: the innermost last.
    """
    summary = traceback.StackSummary.from_list([(file, line, name, None) for file, line, name in frames])
    return "".join(summary.format())


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def _waits_in(pid: int) -> str:
    """The function of the kernel in which the main thread sleeps, where the kernel tells it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # another system than Linux, not allowed, or the process has just ended
        return ""
    return f" in {name}" if name not in ("", "0") else ""


def _spell_end(pid: int) -> str:
    """How a child of this process ended, without taking the news from the one that waits for it."""
    if not hasattr(os, "waitid"):
        return ENDED
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ENDED
    if found is None:
        return ENDED
    by_code = found.si_code == os.CLD_EXITED
    return f"{ENDED} with exit code {found.si_status}" if by_code else f"{ENDED} by signal {found.si_status}"
