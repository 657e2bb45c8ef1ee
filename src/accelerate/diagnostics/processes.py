"""Where threads of this process are, and what other processes of this machine do.

A thread is read from another thread, while it may be blocked outside Python. Of other processes there are
their states and stacks, and which of them are ranks of the run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import site
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil
import torch

from accelerate.base import Frame, ask, ask_all, stack_dumps
from accelerate.diagnostics.hang_report import BACKWARD

T = TypeVar("T")

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
_CAN_ANSWER = (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_IDLE)
"""Processes in these states can write their stack."""
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_RUNNERS = (f"{_OURS}launch{os.sep}", "<frozen runpy>")
_COLLECTIVES = tuple(f"{_TORCH}{path}" for path in (f"distributed{os.sep}", f"nn{os.sep}parallel{os.sep}"))
_AUTOGRAD = f"{_TORCH}autograd{os.sep}"
_WRAPPERS = ("wrapper", "inner", "_fn", "decorate_context")


@dataclass(frozen=True)
class Position:
    """Where a thread is."""

    file: str  # of the user's innermost frame; of the outermost one where all belong to libraries
    line: int
    function: str  # the library function that the user's line called, the user's own function without one
    waits_in: str  # the operation of torch that may wait for other processes, such as "all_reduce", or empty
    stack: str  # as Python prints it, the innermost line last


def innermost(thread: int) -> FrameType | None:
    """The frame that a thread executes; None when it has ended."""
    # Python 3.11 and 3.12 may collect garbage here while they hold a lock that a forked process inherits in
    # its locked state (python/cpython#106883): a worker of a loader that is forked meanwhile deadlocks.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def read_position(frame: FrameType) -> Position:
    """Describe where a thread is, from its innermost frame."""
    outwards = (f for f, _ in traceback.walk_stack(frame))
    frames = list(takewhile(lambda f: not _file(f).startswith(_RUNNERS), outwards))
    index = next((i for i, f in enumerate(frames) if not _file(f).startswith(_libraries())), len(frames) - 1)
    user = frames[index]
    called = frames[index - 1] if index else user
    lines = ((frame, frame.f_lineno or 0) for frame in reversed(frames))
    return Position(
        file=_file(user),
        line=user.f_lineno or 0,
        function=called.f_code.co_name,
        waits_in=waiting_operation(frames[:index]),
        stack="".join(traceback.format_list(traceback.StackSummary.extract(lines))),
    )


def may_wait(frame: FrameType) -> bool:
    """Whether a thread is, by its innermost frame, in an operation of torch that may wait for others."""
    return _file(frame).startswith((*_COLLECTIVES, _AUTOGRAD))


def may_compute(frame: FrameType) -> bool:
    """Whether a thread is, by its innermost frame, in a backward, which computes more often than it waits."""
    return _file(frame).startswith(_AUTOGRAD)


def waiting_operation(frames: list[FrameType]) -> str:
    """Name the operation of torch that may wait for other processes; empty where there is none.

    The frames are those from the innermost to the one that the user's line called.
    """
    if not frames or not may_wait(frames[0]):
        return ""
    if may_compute(frames[0]):
        return BACKWARD
    names = [f.f_code.co_name for f in frames if _file(f).startswith(_COLLECTIVES)]
    return next((name for name in reversed(names) if name not in _WRAPPERS), names[-1])


def without_runners(frames: list[Frame]) -> list[Frame]:
    """The frames of a stack without those of the launcher, which the user did not write."""
    return [frame for frame in frames if not frame[0].startswith(_RUNNERS)]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the user's."""
    # Nothing is imported here: watchers read positions, and a process that is forked while another thread
    # imports a module never gets that module.
    paths = {Path(os.__file__).parent, *site.getsitepackages()}
    return (_OURS, _TORCH, contextlib.__file__, "<frozen ", *(f"{path}{os.sep}" for path in paths))


def describe(pid: int) -> str:
    """Say what a process does, as what follows its name: "sleeps in hrtimer_nanosleep, 0.8 s of CPU time"."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            word, times = _WORDS.get(process.status(), process.status()), process.cpu_times()
    except psutil.NoSuchProcess:
        return ENDED
    if word == ENDED:
        return _spell_end(pid)
    function = _kernel_function(pid) if word == _WORDS[psutil.STATUS_SLEEPING] else ""
    return f"{word}{function}, {times.user + times.system:.1f} s of CPU time"


def runs(pid: int, born: float | None = None) -> bool:
    """Whether a process runs and is no zombie; one of the same number that was not `born` then is another."""
    try:
        process = psutil.Process(pid)
        return born in (None, process.create_time()) and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stack_of(pid: int) -> list[Frame]:
    """The Python stack of a process, the innermost frame last; empty where it cannot be had."""
    return ask(pid) if _status(pid) in _CAN_ANSWER else []


def stacks_of_all_threads(pid: int) -> list[list[Frame]]:
    """The Python stacks of the threads of a process that sleeps; none where they cannot be had."""
    return ask_all(pid) if _status(pid) == psutil.STATUS_SLEEPING else []


def spell_stack(frames: Iterable[Frame]) -> str:
    """Write a stack, the innermost frame last, as Python prints it."""
    summary = traceback.StackSummary.from_list([(file, line, name, None) for file, line, name in frames])
    return "".join(summary.format())


def _status(pid: int) -> str:
    return _read(lambda: str(psutil.Process(pid).status()), str(psutil.STATUS_DEAD))


def _kernel_function(pid: int) -> str:
    """The function of the kernel in which the main thread sleeps, where the kernel says it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # another system than Linux, not allowed, or the process has just ended
        return ""
    return f" in {name}" if name not in ("", "0") else ""


def _spell_end(pid: int) -> str:
    """How a child of this process ended, without taking its exit code from whoever waits for it."""
    if sys.platform != "win32" and hasattr(os, "waitid"):  # macOS has it since Python 3.13
        with contextlib.suppress(ChildProcessError):  # it is no child of this process
            if child := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                how = "with exit code" if child.si_code == os.CLD_EXITED else "by signal"
                return f"{ENDED} {how} {child.si_status}"
    return ENDED


@dataclass(frozen=True)
class Siblings:
    """The ranks that one process has started on this machine."""

    starter: int  # the process
    pids: Mapping[int, int]  # the processes that run by their ranks, this one included
    is_complete: bool  # a rank of this machine that is not among them has ended


def find_siblings(rank: int) -> Siblings | None:
    """Find the ranks whose starter started this process too; None where it set no rank in the environment."""
    process = psutil.Process()
    own, value = _variables(process), str(rank)
    name = next((name for name in RANK_VARIABLES if own.get(name) == value), "")
    # The nearest ancestor that has no rank: a script may run inside of another program, such as a shell.
    parents = process.parents() if name else []
    starter = next((parent for parent in parents if _variables(parent).get(name) != value), None)
    if starter is None:
        return None
    candidates: dict[int, list[psutil.Process]] = {}
    for child in starter.children(recursive=True):
        number = _variables(child).get(name, "")
        if number.isdigit() and runs(child.pid):
            candidates.setdefault(int(number), []).append(child)
    pids = {number: _choose(children) for number, children in candidates.items()}
    return Siblings(starter.pid, pids, is_complete=_AGENT_VARIABLE in own)


def _choose(processes: list[psutil.Process]) -> int:
    """The process of a rank that runs the script; others of it start that one, or were started by it."""
    program = _read(psutil.Process().exe, "")
    alike = [process for process in processes if _read(process.exe, "") == program] or processes
    return next((process.pid for process in alike if stack_dumps.offers(process.pid)), alike[0].pid)


def _variables(process: psutil.Process) -> dict[str, str]:
    """The environment that a process was started with; empty where it cannot be read."""
    return _read(process.environ, {})


def _read(fact: Callable[[], T], unknown: T) -> T:
    try:
        return fact()
    except psutil.Error:  # of another user, or ended
        return unknown
