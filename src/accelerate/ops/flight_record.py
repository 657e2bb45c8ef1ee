"""The flight record of this process: its last collectives, each with the line of the user that called it.

It is written in every collective, so it stores objects and numbers only; names of files and lines are
computed when it is read, which happens after a failure.
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

LENGTH = 32
"""Number of operations that are recorded."""

_ROOTS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
    "<frozen ",
)


@functools.cache
def _is_inside(file: str) -> bool:
    """Whether a file belongs to this package, to torch or to the interpreter."""
    return file.startswith(_ROOTS)


def calling_frame(frame: FrameType) -> FrameType:
    """Return the first frame from this one on that belongs neither to this package nor to torch."""
    while _is_inside(frame.f_code.co_filename):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


@dataclass(frozen=True)
class Entry:
    """One operation, as reports show it."""

    sequence: int  # its number in this process, from 1; equal on all ranks as long as they do the same
    operation: str  # name of the outermost operation
    facts: str  # what it was called with, such as shapes
    started: float  # `time.monotonic()` when it began
    file: str  # the user's file that called it; empty where all frames are in this package or torch
    line: int  # the line there; 0 where it is not known


_Raw = tuple[int, str, object, float, CodeType, int]


class Ring:
    """The last operations of one thread of this process: the one that trains.

    Other threads may call the same functions; what they do is not recorded.
    """

    def __init__(self) -> None:
        self._entries: deque[_Raw] = deque(maxlen=LENGTH)
        self._sequence = 0
        self._depth = 0
        self._running: _Raw | None = None
        self._phase = 0  # of the step, around the operation
        self.owner = threading.main_thread().ident  # the thread that trains

    def begin(self, operation: str, facts: object) -> None:
        """Record that an operation begins; inside another one it is a part of that one.

        `facts` is what it is called with, as small objects without tensors.
        """
        if threading.get_ident() != self.owner:
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._phase = step_clock.wait_for_ranks()
        frame = calling_frame(sys._getframe(1))
        self._sequence += 1
        self._running = (self._sequence, operation, facts, time.monotonic(), frame.f_code, frame.f_lasti)
        self._entries.append(self._running)

    def end(self) -> None:
        """Record that the operation begun last has returned or failed."""
        if threading.get_ident() != self.owner:
            return
        if self._depth == 1:
            self._running = None
            step_clock.resume(self._phase)
        if self._depth:
            self._depth -= 1

    @contextlib.contextmanager
    def entry(self, operation: str) -> Iterator[None]:
        """Record the block as an operation."""
        self.begin(operation, None)
        try:
            yield
        finally:
            self.end()

    def reset(self) -> None:
        """Clear the record, and record the operations of the calling thread from now on."""
        self._entries.clear()
        self._sequence = self._depth = 0
        self._running = None
        self.owner = threading.get_ident()

    def running(self) -> Entry | None:
        """The operation that has not returned yet; None without one. May be called from any thread."""
        raw = self._running
        return None if raw is None else _entry(raw)

    def entries(self) -> list[Entry]:
        """The last operations, the oldest first. May be called from any thread."""
        return [_entry(raw) for raw in self._entries.copy()]


def flight_recorder() -> Ring:
    """Return the record of this process, a service of the process."""
    return services.of_process(Ring)


if hasattr(os, "register_at_fork"):  # not on Windows, which starts processes without fork
    os.register_at_fork(after_in_child=lambda: flight_recorder().reset())


def recorded(function: Callable[P, R], argument: int = 0) -> Callable[P, R]:
    """Record each call of a function, with the shape and dtype, or the type, of one argument by index."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        record = flight_recorder()
        record.begin(name, _facts_of(args[argument]) if len(args) > argument else None)
        try:
            return function(*args, **kwargs)
        finally:
            record.end()

    return call


def _facts_of(argument: object) -> object:
    """What is recorded of an argument, without a reference to it."""
    if not isinstance(argument, Tensor):
        return type(argument)
    return f"nested {argument.dtype}" if argument.is_nested else (argument.shape, argument.dtype)


def _entry(raw: _Raw) -> Entry:
    sequence, operation, facts, started, code, instruction = raw
    file = "" if _is_inside(code.co_filename) else code.co_filename
    line = line_of(code, instruction) if file else 0
    return Entry(sequence, operation, _spell(facts), started, file, line)


def line_of(code: CodeType, instruction: int) -> int:
    """The line of the instruction at an offset in bytes; 0 where it has none."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or 0


def _spell(facts: object) -> str:
    match facts:
        case None:
            return ""
        case (torch.Size() as shape, torch.dtype() as dtype):
            return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
    return facts.__name__ if isinstance(facts, type) else str(facts)
