"""Runs that lose processes go on with the remaining ones, and grow again, with the same steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelerate.launch import get_free_port

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
LIMIT = 100
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed

FOLDER, PAUSE, LOST = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])


class Progress:
    def __init__(self):
        self.epoch = self.batch = self.step = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


accelerator = Accelerator(
    gradient_accumulation_plugin=GradientAccumulationPlugin(global_batch_size=12),
    project_config=ProjectConfiguration(FOLDER, automatic_checkpoint_naming=True, total_limit=2),
)
set_seed(0)
rows = torch.randn(70, 5, generator=torch.Generator().manual_seed(1))
data = [(row, row.sum().tanh(), index) for index, row in enumerate(rows)]
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
model, optimizer, scheduler, loader = accelerator.prepare(
    model, optimizer, scheduler, DataLoader(data, batch_size=3, shuffle=True)
)
progress = Progress()
accelerator.register_for_checkpointing(progress)
if any(FOLDER.glob("checkpoints/checkpoint_*")):
    accelerator.load_state(world_size_policy="ignore")
samples = []
for epoch in range(progress.epoch, 3):
    batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
    for inputs, targets, indices in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs).squeeze(1), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.batch += 1
        samples += accelerator.gather_for_metrics(indices).tolist()
        if not accelerator.sync_gradients:
            continue
        progress.step += 1
        if accelerator.is_main_process:
            rate = scheduler.get_last_lr()[0]
            record = [progress.step, sorted(samples), rate, accelerator.num_processes]
            with open(FOLDER / "steps.jsonl", "a") as file:
                file.write(json.dumps(record) + "\\n")
        samples = []
        time.sleep(PAUSE)
        if progress.step == 3 and accelerator.process_index == LOST < accelerator.num_processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if accelerator.should_save or progress.step % 2 == 0:
            accelerator.save_state()
        if accelerator.should_stop:
            accelerator.end_training()
            sys.exit()
    progress.epoch, progress.batch = epoch + 1, 0
if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), FOLDER / "end.pt")
accelerator.end_training()
"""


class Launches:
    """Launches of the script, of which none outlives its test."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "train.py"
        self.script.write_text(TRAIN)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, project: Path, *words: str, pause: float = 0.0, lost: int = -1) -> subprocess.Popen[str]:
        project.mkdir(exist_ok=True)
        command = [*LAUNCH, *words, str(self.script), str(project), str(pause), str(lost)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return self.started[-1]

    def run(self, project: Path, *words: str, lost: int = -1) -> str:
        return end(self.start(project, *words, lost=lost))


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and its processes, as the loss of a machine does."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in family:
        each.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT)


def end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    return output


def steps(project: Path) -> list[list[Any]]:
    path = project / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_equal(project: Path, expected: Path) -> None:
    """Check samples and learning rate of each attempt to take a step, and the weights at the end."""
    truth = {step: (samples, rate) for step, samples, rate, _ in steps(expected)}
    found = {(step, tuple(samples), rate) for step, samples, rate, _ in steps(project)}
    assert found == {(step, tuple(samples), rate) for step, (samples, rate) in truth.items()}
    weights, wanted = torch.load(project / "end.pt"), torch.load(expected / "end.pt")
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)


def sizes(project: Path) -> list[int]:
    """Numbers of processes of the run, each time that it changed."""
    numbers = [size for *_, size in steps(project)]
    return [now for before, now in zip([0, *numbers], numbers, strict=False) if before != now]


@pytest.mark.slow
def test_a_run_on_one_machine_continues_without_a_process_that_fails(
    tmp_path: Path, launches: Launches
) -> None:
    launches.run(tmp_path / "whole", "--num_processes", "1")
    output = launches.run(
        tmp_path / "lost", "--num_processes", "3", "--min_processes", "2", "--main_process_port", "0", lost=1
    )
    assert "rank 1 has failed twice and is left out: the run continues with 2 of its processes" in output
    assert sizes(tmp_path / "lost") == [3, 2]
    check_equal(tmp_path / "lost", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_continues_without_a_machine_and_grows_when_it_returns(
    tmp_path: Path, launches: Launches
) -> None:
    launches.run(tmp_path / "whole", "--num_processes", "1")
    project, port = tmp_path / "elastic", str(get_free_port())
    words = ["--nnodes", "1:2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", port]

    first = launches.start(project, *words, pause=1.0)
    second = launches.start(project, *words, "--machine_rank", "1", pause=1.0)
    wait_until(lambda: len(steps(project)) >= 5)
    kill(second)
    wait_until(lambda: sizes(project) == [2, 1])
    returned = launches.start(project, *words, "--machine_rank", "1", pause=1.0)
    end(first)
    end(returned)
    assert sizes(project) == [2, 1, 2]
    check_equal(project, tmp_path / "whole")


@pytest.mark.slow
def test_a_run_continues_without_a_machine_that_receives_a_signal(tmp_path: Path, launches: Launches) -> None:
    launches.run(tmp_path / "whole", "--num_processes", "1")
    project = tmp_path / "elastic"
    words = ["--nnodes", "1:2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", str(get_free_port())]
    first = launches.start(project, *words, pause=0.5)
    second = launches.start(project, *words, "--machine_rank", "1", pause=0.5)
    wait_until(lambda: len(steps(project)) >= 4)
    second.terminate()
    output, _ = second.communicate(timeout=LIMIT)
    assert second.returncode == 128 + signal.SIGTERM, output
    end(first)
    assert sizes(project) == [2, 1]
    assert len({step for step, *_ in steps(project)}) == len(steps(project))  # no step is taken again
    check_equal(project, tmp_path / "whole")


@pytest.mark.slow
def test_a_run_with_too_few_machines_ends_with_one_error(tmp_path: Path, launches: Launches) -> None:
    words = ["--nnodes", "2:3", "--num_processes", "3", "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", str(get_free_port()), "--rdzv_conf", "join_timeout=3"]
    process = launches.start(tmp_path / "run", *words)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "error: Not enough machines have joined the run at 127.0.0.1:" in output
    assert "it needs 2. Start the others" in output
    assert "Traceback" not in output
