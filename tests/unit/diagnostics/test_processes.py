"""What the operating system says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

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


def test_a_process_sleeps_and_is_stopped() -> None:
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
