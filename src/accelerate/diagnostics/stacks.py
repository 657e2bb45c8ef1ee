"""Where a thread of this process is, read from another thread while it may be blocked outside Python."""

from __future__ import annotations

import contextlib
import os
import site
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import FrameType

import torch

from accelerate.base import Frame
from accelerate.diagnostics.hang_report import BACKWARD

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
    return sys._current_frames().get(thread)


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
