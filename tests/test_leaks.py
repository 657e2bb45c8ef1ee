"""The leak detector of conftest.py, seen from outside: a test that leaks fails, another one passes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
HEADER = "import os, socket, subprocess, sys, threading, time\n"
FAKE_STATE = """
import types
module = types.ModuleType("accelerate.state")
class State:
    _shared_state = {}
    @classmethod
    def _reset_state(cls):
        cls._shared_state.clear()
module.PartialState = State
module.AcceleratorState = type("AcceleratorState", (State,), {"_shared_state": {}})
module.GradientState = type("GradientState", (State,), {"_shared_state": {}})
sys.modules["accelerate.state"] = module
"""
PROCESS_GROUP = """
import torch.distributed
store = torch.distributed.HashStore()
def test_it():
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
SLEEP = "[sys.executable, '-c', 'import time; time.sleep(20)']"

LEAKS = {
    "environment variables: LEFT=1": "def test_it(): os.environ['LEFT'] = '1'",
    "environment variables: HOME=": "def test_it(): del os.environ['HOME']",
    "threads: <Thread": "def test_it(): threading.Thread(target=time.sleep, args=(8,), daemon=True).start()",
    "child processes: psutil.Process": f"kept = []\ndef test_it(): kept.append(subprocess.Popen({SLEEP}))",
    "listening ports:": "kept = []\ndef test_it(): kept.append(socket.create_server(('127.0.0.1', 0)))",
    "process groups: torch.distributed": PROCESS_GROUP,
    "states (a test": FAKE_STATE + "def test_it(): module.PartialState._shared_state['device'] = 'cpu'",
}
TIDY = {
    "environment": "def test_it(monkeypatch): monkeypatch.setenv('LEFT', '1')",
    "thread": "def test_it(): threading.Thread(target=time.sleep, args=(0.2,)).start()",
    "process": "def test_it(): subprocess.run([sys.executable, '-c', 'pass'])",
    "port": "def test_it():\n    with socket.create_server(('127.0.0.1', 0)): pass",
    "states": FAKE_STATE + "def test_it(states): module.PartialState._shared_state['device'] = 'cpu'",
}


def run_pytest(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a test file under a copy of our conftest, in a pytest of its own."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(HEADER + source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("complaint", LEAKS)
def test_a_leak_fails_the_test(tmp_path: Path, complaint: str) -> None:
    done = run_pytest(tmp_path, LEAKS[complaint])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this test left behind" in done.stdout
    assert complaint in done.stdout


@pytest.mark.parametrize("kind", TIDY)
def test_a_test_without_leaks_passes(tmp_path: Path, kind: str) -> None:
    done = run_pytest(tmp_path, TIDY[kind])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_next_test_starts_clean(tmp_path: Path) -> None:
    leaky = (
        "def test_first(): module.PartialState._shared_state['device'] = 'cpu'; os.environ['LEFT'] = '1'\n"
    )
    clean = (
        "def test_second(): assert not module.PartialState._shared_state; assert 'LEFT' not in os.environ\n"
    )
    done = run_pytest(tmp_path, FAKE_STATE + leaky + clean)
    assert "2 passed, 1 error" in done.stdout, done.stdout
