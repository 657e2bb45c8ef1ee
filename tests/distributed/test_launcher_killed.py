"""Processes and temporary folders of a launcher that SIGKILL has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
SCRIPT = """
import os, pathlib, time
pathlib.Path(os.environ["FOLDER"], f"{os.getpid()}.pid").touch()
time.sleep(300)
"""
NOTEBOOK = """
import os, pathlib, time
from accelerate import notebook_launcher

def train():
    pathlib.Path(os.environ["FOLDER"], f"{os.getpid()}.pid").touch()
    time.sleep(300)

notebook_launcher(train, num_processes=2, use_port="0")
"""
SECONDS = 60.0


def wait_until(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()


def processes_after_kill(folder: Path, command: list[str], count: int) -> list[int]:
    """Starts a command, kills it when its processes run, and returns those that do not end."""
    (folder / "tmp").mkdir(exist_ok=True)
    variables = {**os.environ, "FOLDER": str(folder), "TMPDIR": str(folder / "tmp")}
    launched = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        assert wait_until(lambda: len(list(folder.glob("*.pid"))) == count)
    finally:
        launched.send_signal(signal.SIGKILL)
        launched.wait()
    pids = [int(path.stem) for path in folder.glob("*.pid")]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.skipif(sys.platform == "win32", reason="the system has no SIGKILL")
@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--num_processes", "1"], 1),
        (["--num_processes", "2"], 2),
        pytest.param(["--num_processes", "2", "--max_restarts", "2"], 2, marks=pytest.mark.slow),
        pytest.param(["--replicas", "2", "--num_processes", "4"], 4, marks=pytest.mark.slow),
    ],
)
def test_processes_end_with_their_launcher(tmp_path: Path, options: list[str], count: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert processes_after_kill(tmp_path, [*LAUNCH, *options, str(script)], count) == []


@pytest.mark.slow
def test_processes_of_a_notebook_end_with_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOTEBOOK)
    assert processes_after_kill(tmp_path, [sys.executable, str(script)], 2) == []


WATCHING = """
import os, pathlib, subprocess, sys, time
child = '''
import os, pathlib, sys, time
sys.platform = "darwin"
from accelerate.base import end_with_parent
end_with_parent(os.getppid())
pathlib.Path(os.environ["FOLDER"], f"{os.getpid()}.pid").touch()
time.sleep(300)
'''
subprocess.run([sys.executable, "-c", child])
"""


@pytest.mark.slow
def test_a_process_looks_for_its_parent_where_the_kernel_sends_no_signal(tmp_path: Path) -> None:
    assert processes_after_kill(tmp_path, [sys.executable, "-c", WATCHING], 1) == []


def test_the_next_launch_removes_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    processes_after_kill(tmp_path, [*LAUNCH, str(script)], 1)
    assert len(list((tmp_path / "tmp").glob("accelerate-launch-*"))) == 1
    script.write_text("")
    variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    subprocess.run([*LAUNCH, str(script)], env=variables, check=True, timeout=SECONDS)
    assert list((tmp_path / "tmp").iterdir()) == []
