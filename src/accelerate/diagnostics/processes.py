"""Positions of threads of this process, and states of other processes of this node, for hang reports.

The position of a thread is read in another thread, while the first may be blocked outside of Python. Other
processes are described by their states and stacks. `find_siblings` returns those which are ranks of the run.
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
_STATE_TEXTS = {
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
"""States in which a process can write its stack."""
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LAUNCHER_FILES = (f"{_PACKAGE}launch{os.sep}", "<frozen runpy>")
_COLLECTIVES = tuple(f"{_TORCH}{path}" for path in (f"distributed{os.sep}", f"nn{os.sep}parallel{os.sep}"))
_AUTOGRAD = f"{_TORCH}autograd{os.sep}"
_WRAPPERS = ("wrapper", "inner", "_fn", "decorate_context")


@dataclass(frozen=True)
class Position:
    """Position of a thread."""

    file: str  # of the innermost frame of the user, or the outermost frame if all are in libraries
    line: int
    function: str  # library function that the user's line called, or the function of the user
    waits_in: str  # operation of torch that may wait for other ranks, such as "all_reduce", or empty
    stack: str  # in the format of Python, with the innermost line last


def innermost(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread, or None if it has ended."""
    # Python 3.11 and 3.12 may collect garbage here while they hold a lock. A process that is forked
    # meanwhile, such as a worker of a loader, inherits the held lock and deadlocks (python/cpython#106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def read_position(frame: FrameType) -> Position:
    """Returns the position of a thread with this innermost frame."""
    outwards = (f for f, _ in traceback.walk_stack(frame))
    frames = list(takewhile(lambda f: not _file(f).startswith(_LAUNCHER_FILES), outwards))
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
    """Returns whether a thread with this innermost frame may wait for other ranks in torch."""
    return _file(frame).startswith((*_COLLECTIVES, _AUTOGRAD))


def may_compute(frame: FrameType) -> bool:
    """Returns whether a thread with this innermost frame is in a backward, which mostly computes."""
    return _file(frame).startswith(_AUTOGRAD)


def waiting_operation(frames: list[FrameType]) -> str:
    """Returns the name of the operation of torch that may wait for other ranks, or an empty string.

    The frames are those from the innermost one to the one that the user's line called.
    """
    if not frames or not may_wait(frames[0]):
        return ""
    if may_compute(frames[0]):
        return BACKWARD
    names = [f.f_code.co_name for f in frames if _file(f).startswith(_COLLECTIVES)]
    return next((name for name in reversed(names) if name not in _WRAPPERS), names[-1])


def without_launcher_frames(frames: list[Frame]) -> list[Frame]:
    """Returns a stack without the frames of the launcher."""
    return [frame for frame in frames if not frame[0].startswith(_LAUNCHER_FILES)]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


@cache
def _libraries() -> tuple[str, ...]:
    """Returns the folders of code that is not written by the user."""
    # Nothing is imported here, because a process that is forked while another thread imports a module can
    # never import that module. Other threads read positions at any time.
    paths = {Path(os.__file__).parent, *site.getsitepackages()}
    return (_PACKAGE, _TORCH, contextlib.__file__, "<frozen ", *(f"{path}{os.sep}" for path in paths))


def describe(pid: int) -> str:
    """Describes a process as text that follows its name.

    An example is "sleeps in hrtimer_nanosleep, 0.8 s of CPU time".
    """
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            text, times = _STATE_TEXTS.get(process.status(), process.status()), process.cpu_times()
    except psutil.NoSuchProcess:
        return ENDED
    if text == ENDED:
        return _describe_exit(pid)
    function = _kernel_function(pid) if text == _STATE_TEXTS[psutil.STATUS_SLEEPING] else ""
    return f"{text}{function}, {times.user + times.system:.1f} s of CPU time"


def runs(pid: int, start_time: float | None = None) -> bool:
    """Returns whether a process runs and is not a zombie.

    A process with the same ID and another `start_time` is another process.
    """
    try:
        process = psutil.Process(pid)
        return start_time in (None, process.create_time()) and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stack_of(pid: int) -> list[Frame]:
    """Returns the Python stack of a process, with the innermost frame last.

    Empty if the process cannot write it.
    """
    return ask(pid) if _status(pid) in _CAN_ANSWER else []


def stacks_of_all_threads(pid: int) -> list[list[Frame]]:
    """Returns the Python stacks of the threads of a sleeping process.

    Empty if the process does not sleep or cannot write them.
    """
    return ask_all(pid) if _status(pid) == psutil.STATUS_SLEEPING else []


def format_stack(frames: Iterable[Frame]) -> str:
    """Formats a stack like Python, with the innermost frame last."""
    summary = traceback.StackSummary.from_list([(file, line, name, None) for file, line, name in frames])
    return "".join(summary.format())


def _status(pid: int) -> str:
    return _read(lambda: str(psutil.Process(pid).status()), str(psutil.STATUS_DEAD))


def _kernel_function(pid: int) -> str:
    """Returns the kernel function in which the main thread sleeps, if the kernel reports it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # not Linux, no permission, or the process has just ended
        return ""
    return f" in {name}" if name not in ("", "0") else ""


def _describe_exit(pid: int) -> str:
    """Describes how a child of this process ended.

    Its exit code stays available to code that waits for the child.
    """
    if sys.platform != "win32" and hasattr(os, "waitid"):  # on macOS since Python 3.13
        with contextlib.suppress(ChildProcessError):  # not a child of this process
            if child := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                cause = "with exit code" if child.si_code == os.CLD_EXITED else "by signal"
                return f"{ENDED} {cause} {child.si_status}"
    return ENDED


@dataclass(frozen=True)
class Siblings:
    """Ranks that one process has started on this node."""

    launcher: int  # process ID of the process that started the ranks
    pids: Mapping[int, int]  # rank -> process ID of its running process, including this process
    is_complete: bool  # whether all other ranks of this node have ended


def find_siblings(rank: int) -> Siblings | None:
    """Returns the ranks that were started by the launcher of this process.

    None if the launcher has not set a rank in the environment.
    """
    process = psutil.Process()
    variables, value = _variables(process), str(rank)
    name = next((name for name in RANK_VARIABLES if variables.get(name) == value), "")
    # The nearest ancestor without this rank. A script may run inside of another program, such as a shell.
    parents = process.parents() if name else []
    launcher = next((parent for parent in parents if _variables(parent).get(name) != value), None)
    if launcher is None:
        return None
    candidates: dict[int, list[psutil.Process]] = {}
    for child in launcher.children(recursive=True):
        number = _variables(child).get(name, "")
        if number.isdigit() and runs(child.pid):
            candidates.setdefault(int(number), []).append(child)
    pids = {number: _choose(children) for number, children in candidates.items()}
    return Siblings(launcher.pid, pids, is_complete=_AGENT_VARIABLE in variables)


def _choose(processes: list[psutil.Process]) -> int:
    """Returns the process ID of the process that runs the script, among all processes of a rank.

    The other processes have started it, or were started by it.
    """
    program = _read(psutil.Process().exe, "")
    same_program = [process for process in processes if _read(process.exe, "") == program] or processes
    return next(
        (process.pid for process in same_program if stack_dumps.offers(process.pid)), same_program[0].pid
    )


def _variables(process: psutil.Process) -> dict[str, str]:
    """Returns the environment with which a process was started, or an empty dict if it cannot be read."""
    return _read(process.environ, {})


def _read(read: Callable[[], T], default: T) -> T:
    try:
        return read()
    except psutil.Error:  # the process belongs to another user, or has ended
        return default
