"""Flight recorder of this process, with its last collectives and the line of user code that called each.

Transports and public collectives write it, and the hang reports of `accelerate.diagnostics` read it. It is
written in every collective, so it stores objects and numbers only. Names of files and lines are computed when
it is read, which happens after a failure.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from accelerate.state import services, step_clock

P = ParamSpec("P")
R = TypeVar("R")

MAX_ENTRIES = 32
"""Number of operations that the recorder keeps."""

_ROOTS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
    "<frozen ",
)


@functools.cache
def _is_inside(file: str) -> bool:
    """Returns whether a file belongs to this package, to torch or to the interpreter."""
    return file.startswith(_ROOTS)


def calling_frame(frame: FrameType) -> FrameType:
    """Returns the innermost frame of user code, starting at `frame`.

    A frame of user code belongs neither to this package nor to torch. Without one, the outermost frame is
    returned.
    """
    while _is_inside(frame.f_code.co_filename):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


@dataclass(frozen=True)
class RecordedOperation:
    """Recorded operation in the form that reports contain."""

    sequence: int  # number in this process, from 1, equal on all ranks that make the same calls
    operation: str  # name of the outermost operation
    arguments: str  # description of its arguments, such as shape and dtype
    started: float  # `time.monotonic()` at the start
    file: str  # file of user code that called it, or "" if all frames are in this package or torch
    line: int  # line in `file`, or 0 if it is not known


_RawEntry = tuple[int, str, object, float, CodeType, int]


class FlightRecorder:
    """Ring buffer of the last operations of the training thread.

    Operations of other threads, which may call the same functions, are not recorded.
    """

    def __init__(self) -> None:
        self._entries: deque[_RawEntry] = deque(maxlen=MAX_ENTRIES)
        self._sequence = 0
        self._depth = 0
        self._running: _RawEntry | None = None
        self._phase = 0  # phase of the step clock before the operation
        self.owner = threading.main_thread().ident  # the training thread

    def begin(self, operation: str, arguments: object) -> None:
        """Records the start of an operation, unless it is inside another one.

        Args:
            arguments: Description of the arguments, made of small objects without references to tensors.
        """
        if threading.get_ident() != self.owner:
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._phase = step_clock.wait_for_ranks()
        frame = calling_frame(sys._getframe(1))
        self._sequence += 1
        self._running = (self._sequence, operation, arguments, time.monotonic(), frame.f_code, frame.f_lasti)
        self._entries.append(self._running)

    def end(self) -> None:
        """Records that the innermost operation has returned or failed."""
        if threading.get_ident() != self.owner:
            return
        if self._depth == 1:
            self._running = None
            step_clock.resume(self._phase)
        if self._depth:
            self._depth -= 1

    @contextlib.contextmanager
    def entry(self, operation: str) -> Iterator[None]:
        """Records the block as an operation."""
        self.begin(operation, None)
        try:
            yield
        finally:
            self.end()

    def reset(self) -> None:
        """Clears the recorder, and makes the calling thread the one that is recorded."""
        self._entries.clear()
        self._sequence = self._depth = 0
        self._running = None
        self.owner = threading.get_ident()

    def running(self) -> RecordedOperation | None:
        """Returns the operation that has not returned yet, or None.

        May be called from any thread.
        """
        raw = self._running
        return None if raw is None else _entry(raw)

    def entries(self) -> list[RecordedOperation]:
        """Returns the last operations, the oldest first.

        May be called from any thread.
        """
        return [_entry(raw) for raw in self._entries.copy()]


def flight_recorder() -> FlightRecorder:
    """Returns the flight recorder of this process."""
    return services.of_process(FlightRecorder)


if hasattr(os, "register_at_fork"):  # not on Windows, which starts processes without fork
    os.register_at_fork(after_in_child=lambda: flight_recorder().reset())


def recorded(function: Callable[P, R], argument: int = 0) -> Callable[P, R]:
    """Wraps a function so that each call is recorded with a description of one positional argument.

    Args:
        argument: Index of that argument. A tensor is described by its shape and dtype, another object by its
            type.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        record = flight_recorder()
        record.begin(name, _description_of(args[argument]) if len(args) > argument else None)
        try:
            return function(*args, **kwargs)
        finally:
            record.end()

    return call


def _description_of(argument: object) -> object:
    """Returns the description of an argument, which keeps no reference to it."""
    if not isinstance(argument, Tensor):
        return type(argument)
    return f"nested {argument.dtype}" if argument.is_nested else (argument.shape, argument.dtype)


def _entry(raw: _RawEntry) -> RecordedOperation:
    sequence, operation, arguments, started, code, instruction = raw
    file = "" if _is_inside(code.co_filename) else code.co_filename
    line = line_of(code, instruction) if file else 0
    return RecordedOperation(sequence, operation, _format_arguments(arguments), started, file, line)


def line_of(code: CodeType, instruction: int) -> int:
    """Returns the line of the instruction at an offset in bytes, or 0 if it has none."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or 0


def _format_arguments(arguments: object) -> str:
    match arguments:
        case None:
            return ""
        case (torch.Size() as shape, torch.dtype() as dtype):
            return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
    return arguments.__name__ if isinstance(arguments, type) else str(arguments)
