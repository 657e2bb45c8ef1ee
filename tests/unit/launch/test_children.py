from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accelerate.launch.children import signals_passed_on

RUN = """
import sys
from accelerate.launch.children import run_child
sys.exit(run_child([sys.executable, "-c", sys.argv[1]], {}, {} if len(sys.argv) < 3 else {2: 15}))
"""
NOTE = "import os, signal, subprocess, sys, time\nopen(f'pid-{os.getpid()}', 'w').close()\n"
STUBBORN = "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
SLEEP = "time.sleep(60)"
WITH_CHILD = f"subprocess.Popen([sys.executable, '-c', {NOTE + STUBBORN + SLEEP!r}])\n"


def runs(pid: int) -> bool:
    """Whether a process is there and not just waiting for whoever adopted it to notice its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(
    folder: Path, code: str, number: signal.Signals, processes: int, *more: str, grace: int = 1
) -> tuple[int, str]:
    """Run a program, send a signal to its launcher, and wait; nothing of it may be left."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", RUN, NOTE + code, *more],
        cwd=folder,
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while len(pids := list(folder.glob("pid-*"))) < processes and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=20)
    finally:
        launcher.kill()
        launcher.wait()
    assert len(pids) == processes
    assert not [path for path in pids if runs(int(path.name.removeprefix("pid-")))]
    return launcher.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_and_is_said(tmp_path: Path, number: signal.Signals) -> None:
    heard = (
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # nohup, or a shell's background, has it ignored
    )
    code, err = end(tmp_path, heard + SLEEP, number, 1, grace=10)
    assert code == 128 + number
    assert f"{number.name} received, ending the processes; what still runs after 10 s is killed." in err
    assert f"{number.name} ended all processes." in err


def test_a_program_that_will_not_end_is_killed_with_all_below_it(tmp_path: Path) -> None:
    code, err = end(tmp_path, STUBBORN + WITH_CHILD + SLEEP, signal.SIGTERM, 2)
    assert code == 137
    assert "2 processes did not end in time and were killed." in err


def test_what_a_program_leaves_behind_is_killed(tmp_path: Path) -> None:
    code, err = end(tmp_path, WITH_CHILD + SLEEP, signal.SIGTERM, 2)
    assert code == 143
    assert "SIGTERM ended all processes, 1 of which had outlived the first." in err


def test_a_program_may_end_in_its_own_way(tmp_path: Path) -> None:
    code, err = end(
        tmp_path, "signal.signal(15, lambda *_: sys.exit(4))\n" + SLEEP, signal.SIGTERM, 1, grace=10
    )
    assert code == 4
    assert "killed" not in err.replace("is killed", "")


def test_another_signal_can_be_sent_in_its_place(tmp_path: Path) -> None:
    code, err = end(tmp_path, SLEEP, signal.SIGINT, 1, "instead")
    assert code == 143
    assert "SIGINT ended all processes." in err


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_request_is_passed_on_and_ends_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """The program goes on for longer than the grace after a signal that asks it to end."""
    heard = f"signal.signal({int(number)}, lambda *_: (time.sleep(1.5), sys.exit(3)))\n"
    code, said = end(tmp_path, heard + SLEEP, number, 1, grace=1)
    assert code == 3
    assert said == ""


def test_an_agent_passes_requests_on_to_its_processes_only() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    plain = {name: value for name, value in os.environ.items() if name != "RANK"}
    rank = subprocess.Popen(sleeper, env={**plain, "RANK": "0"})
    other = subprocess.Popen(sleeper, env=plain)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        time.sleep(0.3)
        with signals_passed_on():
            signal.raise_signal(signal.SIGUSR1)
        assert rank.wait(timeout=10) == -signal.SIGUSR1
        assert other.poll() is None
    finally:
        for process in (rank, other):
            process.kill()
            process.wait()
    assert signal.getsignal(signal.SIGUSR1) == before
