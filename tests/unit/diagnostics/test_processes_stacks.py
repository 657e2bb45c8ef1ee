"""The current line of a thread, read from another thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import torch

from accelerate.diagnostics import processes

HERE = __file__


def test_a_thread_is_found_at_the_users_line_with_the_library_function_that_it_called() -> None:
    gate = threading.Event()

    def hold() -> None:
        gate.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        frame = processes.innermost(thread.ident or 0)
        while frame is not None and frame.f_code.co_name != "wait":
            frame = processes.innermost(thread.ident or 0)
        assert frame is not None
        position = processes.read_position(frame)
    finally:
        gate.set()
        thread.join()
    assert (position.file, position.line) == (HERE, hold.__code__.co_firstlineno + 1)
    assert position.function in ("wait", "__init__", "_acquire_restore")
    assert position.waits_in == ""
    assert "gate.wait()" in position.stack


def test_backward_is_named() -> None:
    found: list[Any] = []

    def look(gradient: torch.Tensor) -> None:
        frame: FrameType | None = sys._getframe().f_back
        while frame is not None and not processes.may_wait(frame):
            frame = frame.f_back
        assert frame is not None
        found.append(processes.read_position(frame))

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(look)
    (leaf * 2).sum().backward()
    assert [(position.file, position.waits_in) for position in found] == [(HERE, "backward")]


READ = """
import sys
from accelerate.diagnostics import observation, processes
before = set(sys.modules)
processes.read_position(sys._getframe())
observation.describe_recorded()
print(sorted(set(sys.modules) - before))
"""


def test_reading_a_position_imports_nothing_that_a_fork_could_then_not_import() -> None:
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
