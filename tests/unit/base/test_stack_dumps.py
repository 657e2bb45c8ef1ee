"""Processes that write their stack on request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accelerate.base import stack_dumps

WAITING = """
import threading
def stand_here():
    print("ready", flush=True)
    input()
"""
OFFERING = f"{WAITING}\nfrom accelerate.base import stack_dumps\nassert stack_dumps.offer()\n"
FORKING = f"""{OFFERING}
import os
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    stand_here()
    os._exit(0)
os.waitpid(child, 0)
"""
SPAWNED = f"""{WAITING}
from accelerate.base.stack_dumps import offer_in_worker
offer_in_worker(print, 7)
stand_here()
"""
TAKEN = """
import signal
from accelerate.base import stack_dumps
signal.signal(stack_dumps.signal_numbers()[0], signal.SIG_IGN)
print(stack_dumps.offer())
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.communicate("\n", timeout=20)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def names(frames: list[stack_dumps.Frame]) -> list[str]:
    return [name for _, _, name in frames]


def test_a_process_with_the_handler_dumps_its_stack_on_each_request() -> None:
    with running(f"{OFFERING}\nstand_here()\n") as process:
        assert read_line(process) == "ready"
        assert stack_dumps.offers(process.pid)
        for _ in range(2):
            frames = stack_dumps.ask(process.pid, timeout=20)
            assert names(frames) == ["<module>", "stand_here"]
            assert frames[-1][0] == "<string>"
    assert process.returncode == 0


def test_the_stacks_of_all_threads_can_be_requested() -> None:
    with running(f"{OFFERING}\nthreading.Thread(target=stand_here).start()\n") as process:
        assert read_line(process) == "ready"
        stacks = stack_dumps.ask_all(process.pid, timeout=20)
    assert sorted(names(frames)[-1] == "stand_here" for frames in stacks) == [False, True]


def test_a_fork_inherits_the_handler_of_its_parent() -> None:
    with running(FORKING) as process:
        child = int(read_line(process))
        assert read_line(process) == "ready"
        assert names(stack_dumps.ask(child, timeout=20))[-1] == "stand_here"


def test_a_spawned_worker_installs_the_handler_and_calls_the_worker_init_fn() -> None:
    with running(SPAWNED) as process:
        assert (read_line(process), read_line(process)) == ("7", "ready")
        assert names(stack_dumps.ask(process.pid, timeout=20))[-1] == "stand_here"


def test_a_process_without_a_handler_gets_no_signal() -> None:
    with running(f"{WAITING}\nstand_here()\n") as process:
        assert read_line(process) == "ready"
        assert not stack_dumps.offers(process.pid)
        assert stack_dumps.ask(process.pid) == []
    assert process.returncode == 0  # the signal would have ended it
    assert stack_dumps.ask(process.pid) == []


def test_a_program_that_uses_the_signal_keeps_it() -> None:
    done = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_systems_without_such_signals_dump_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "signal_numbers", tuple)
    monkeypatch.setattr(stack_dumps, "_files", [])
    assert not stack_dumps.offer()
    assert stack_dumps.ask(1) == []
