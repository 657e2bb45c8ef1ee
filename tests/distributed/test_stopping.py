"""A request to one rank applies to all at the same step; launchers forward signals and wait for the save."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator

Run = Callable[..., list[Any]]
SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from {module} import train
saved = train({target!r}, None, 0.002)
print("saved " + " ".join(map(str, saved)) + "\\n", end="", flush=True)  # one write: lines stay whole
"""


def train(target: str, killed: tuple[int, int, int] | None, pause: float = 0.0) -> tuple[int, int, int]:
    """Train until asked to stop; at (step, rank) a process gets a signal. Return rank, step, saves."""
    accelerator = Accelerator()
    net = torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(torch.ones(100_000, 2))
    )
    (Path(target) / f"ready{accelerator.process_index}").touch()
    saves = 0
    for step, batch in enumerate(loader):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)
        if killed is not None and (step, accelerator.process_index) == killed[:2]:
            os.kill(os.getpid(), killed[2])
        if accelerator.should_save:
            accelerator.save_state(Path(target) / f"step_{step}")
            saves += 1
        if accelerator.should_stop:
            break
    accelerator.end_training()
    return accelerator.process_index, step, saves


def list_checkpoints(folder: Path) -> list[int]:
    """The steps of the committed checkpoints; there is nothing beside them."""
    manifests = [path for path in folder.glob("step_*") if (path / "manifest.json").is_file()]
    assert list(folder.glob("*step_*")) == manifests
    return [int(path.name.removeprefix("step_")) for path in manifests]


@pytest.mark.parametrize(("processes", "rank"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
def test_one_rank_gets_sigterm_and_all_stop_at_one_step(
    run: Run, tmp_path: Path, processes: int, rank: int
) -> None:
    results = run(train, str(tmp_path), (150, rank, signal.SIGTERM), processes=processes)
    ranks, stops, saves = zip(*results, strict=True)
    assert ranks == tuple(range(processes))
    assert len(set(stops)) == 1
    assert 150 <= stops[0] < 20_000
    assert set(saves) == {1}
    assert list_checkpoints(tmp_path) == [stops[0]]


def saves_only(target: str) -> list[int]:
    accelerator = Accelerator()
    saved = []
    for step in range(3000):
        if step == 100 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        if accelerator.should_save:
            saved.append(step)
        assert not accelerator.should_stop
        time.sleep(0.0005)
    return saved


def test_sigusr2_saves_at_one_step_and_training_continues(run: Run, tmp_path: Path) -> None:
    first, second = run(saves_only, str(tmp_path))
    assert first == second
    assert len(first) == 1
    assert first[0] > 100


def launch(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    folder, module = str(Path(__file__).parent), Path(__file__).stem
    script.write_text(SCRIPT.format(folder=folder, module=module, target=str(tmp_path)))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *options, str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process: subprocess.Popen[str], number: int | None, tmp_path: Path, ranks: int) -> str:
    deadline = time.monotonic() + 90
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    time.sleep(0.5)
    if number is not None:
        process.send_signal(number)
    try:
        return process.communicate(timeout=60)[0]
    finally:
        process.kill()


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


TWO = ("--num_processes", "2", "--main_process_port", "0")


@pytest.mark.parametrize(
    ("options", "number", "code"),
    [
        slow(TWO, signal.SIGTERM, 128 + signal.SIGTERM),
        slow(TWO, signal.SIGUSR1, 0),
        slow((*TWO, "--max_time", "00:00:08"), None, 0),
        slow(("--num_processes", "1"), signal.SIGTERM, 0),
        slow(("--num_processes", "1"), signal.SIGUSR1, 0),
    ],
    ids=["SIGTERM to two", "SIGUSR1 to two", "time budget of two", "SIGTERM to one", "SIGUSR1 to one"],
)
def test_a_launched_run_saves_and_ends(
    tmp_path: Path, options: tuple[str, ...], number: int | None, code: int
) -> None:
    process = launch(tmp_path, *options)
    ranks = int(options[1])
    printed = end(process, number, tmp_path, ranks)
    assert process.returncode == code, printed
    saved = re.findall(r"saved (\d) (\d+) (\d)", printed)
    assert len(saved) == ranks, printed
    assert {(step, saves) for _, step, saves in saved} == {(saved[0][1], "1")}
    assert list_checkpoints(tmp_path) == [int(saved[0][1])]


def test_an_invalid_time_budget_starts_no_process(tmp_path: Path) -> None:
    process = launch(tmp_path, "--max_time", "tomorrow")
    printed = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "--max_time" in printed
    assert "tomorrow" in printed
    assert "Traceback" not in printed
