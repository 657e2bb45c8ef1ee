"""Counts calls and bytecodes of functions of the package, which do not depend on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import accelerate

PACKAGE = str(Path(accelerate.__file__).parent)


@dataclass(frozen=True)
class Calls:
    """Number of calls by file and line of the function; each item that a generator yields is a call."""

    by_function: Counter[tuple[str, int]]

    @property
    def total(self) -> int:
        """Number of calls."""
        return self.by_function.total()

    @property
    def functions(self) -> int:
        """Number of functions that were called."""
        return len(self.by_function)

    @property
    def files(self) -> int:
        """Number of files with these functions."""
        return len({file for file, _ in self.by_function})


def count_calls(work: Callable[[], object]) -> Calls:
    """Counts the calls of work in this thread, except for those while a module is imported."""
    calls: Counter[tuple[str, int]] = Counter()
    imported: list[FrameType] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "<module>":
            imported.append(frame)
        elif event == "return" and imported and frame is imported[-1]:
            imported.pop()
        elif event == "call" and not imported and code.co_filename.startswith(PACKAGE):
            calls[code.co_filename, code.co_firstlineno] += 1

    _run(work, profile, sys.getprofile, sys.setprofile)
    return Calls(calls)


def count_bytecodes(work: Callable[[], object]) -> int:
    """Counts the bytecodes of work in this thread."""
    count = 0

    def trace_bytecode(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return trace_bytecode

    def trace_call(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return trace_bytecode

    _run(work, trace_call, sys.gettrace, sys.settrace)
    return count


def _run(
    work: Callable[[], object], hook: Any, current: Callable[[], Any], use: Callable[[Any], None]
) -> None:
    """Runs work with a hook of the interpreter, and restores the one before."""
    before = current()
    use(hook)
    try:
        work()
    finally:
        use(before)
