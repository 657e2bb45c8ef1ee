"""What the operating system says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import psutil
import pytest
import torch

from accelerate.diagnostics import processes

SLEEPING = [sys.executable, "-c", "input()"]

FORK_WHILE_A_THREAD_IS_READ = """
import os, signal, threading, time
from accelerate.diagnostics import processes

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0001)  # gives up the interpreter's lock, as the iterator of a loader does

def read(thread):
    while True:
        processes.innermost(thread)
        Cycle()

def fork(depth):  # in frames that are new each time
    Cycle()
    return fork(depth - 1) if depth else os.fork()

threading.Thread(target=read, args=[threading.get_ident()], daemon=True).start()
for _ in range(500):
    child = fork(20)
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os._exit(3)
        time.sleep(0.0005)
"""


def wait_for(pid: int, status: str) -> None:
    deadline = time.monotonic() + 20
    while psutil.Process(pid).status() != status and time.monotonic() < deadline:
        time.sleep(0.01)


def test_sleeping_and_stopped_processes_are_described() -> None:
    with subprocess.Popen(SLEEPING, stdin=subprocess.PIPE) as process:
        wait_for(process.pid, psutil.STATUS_SLEEPING)
        assert processes.describe(process.pid).startswith("sleeps")
        assert processes.describe(process.pid).endswith(" s of CPU time")
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(process.pid, psutil.STATUS_STOPPED)
        assert processes.describe(process.pid).startswith("is stopped by a signal, ")
        assert processes.stack_of(process.pid) == []
        process.kill()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "has ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "has ended by signal 9"),
    ],
)
def test_the_exit_of_a_child_is_described_and_can_still_be_waited_for(program: str, said: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", program])
    wait_for(process.pid, psutil.STATUS_ZOMBIE)
    assert processes.describe(process.pid) == said
    assert process.wait() in (3, -9)
    assert processes.describe(process.pid) == "has ended"
    assert processes.stacks_of_all_threads(process.pid) == []


def test_stacks_are_written_as_python_does() -> None:
    text = processes.format_stack([(__file__, 1, "outer"), ("<string>", 2, "inner")])
    assert text == (
        f'  File "{__file__}", line 1, in outer\n    """What the operating system says of processes."""\n'
        '  File "<string>", line 2, in inner\n'
    )


@pytest.mark.slow
def test_a_fork_while_the_stack_of_a_thread_is_read_does_not_hang() -> None:
    subprocess.run([sys.executable, "-c", FORK_WHILE_A_THREAD_IS_READ], check=True, timeout=100)


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
