"""The leak detector of conftest.py, seen from outside: a test that leaks fails, another one passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
PATIENCE = 5.0
PATIENCE_LINE = f"PATIENCE = {PATIENCE}"
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


def run_pytest(folder: Path, *sources: str, patience: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run test files under a copy of our conftest, in a pytest of its own.

    `patience` replaces the seconds that threads, processes and ports get to end.
    """
    conftest = CONFTEST.read_text()
    assert PATIENCE_LINE in conftest
    (folder / "conftest.py").write_text(conftest.replace(PATIENCE_LINE, f"PATIENCE = {patience}"))
    for number, source in enumerate(sources):
        (folder / f"test_{number}.py").write_text(HEADER + source)
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
    done = run_pytest(tmp_path, LEAKS[complaint], patience=0.1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this test left behind" in done.stdout
    assert complaint in done.stdout


def test_tests_without_leaks_pass(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, *TIDY.values())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TIDY)} passed" in done.stdout


def test_the_next_test_starts_clean(tmp_path: Path) -> None:
    leaky = (
        "def test_first(): module.PartialState._shared_state['device'] = 'cpu'; os.environ['LEFT'] = '1'\n"
    )
    clean = (
        "def test_second(): assert not module.PartialState._shared_state; assert 'LEFT' not in os.environ\n"
    )
    done = run_pytest(tmp_path, FAKE_STATE + leaky + clean)
    assert "2 passed, 1 error" in done.stdout, done.stdout
