"""Counts the files and functions of the package that the journeys of a script enter.

Each journey is made twice, and the second one is counted, so that names that are loaded on first use do not
count.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from counting import Calls, count_calls
from ranks import start

RANKS, WARM_UP = 2, 5
GOALS = {
    "Accelerator()": 40,
    "prepare for DistributedDataParallel, 2 ranks": 20,
    "synchronizing step with clipping and a scheduler": 9,
    "next batch": 7,
    "save_state in the background": 28,
    "load_state": 36,
    "launch of 2 processes": 22,
}
"""Largest number of files by journey, in the order in which they are made."""


def create() -> Calls:
    """Counts the creation of an `Accelerator` for one process."""
    for _ in range(2):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        calls = count_calls(lambda: Accelerator(cpu=True))
    return calls


def train(folder: str) -> list[Calls] | None:
    """Trains two models on one of several ranks, and returns the journeys of the second one on rank 0."""
    accelerator = Accelerator()
    train_model(accelerator, str(Path(folder, "first")))
    accelerator.free_memory()
    counted = train_model(accelerator, str(Path(folder, "second")))
    accelerator.end_training()
    return counted if accelerator.is_main_process else None


def train_model(accelerator: Accelerator, folder: str) -> list[Calls]:
    """Counts the journeys from `prepare` to `load_state`."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=8, shuffle=True)
    objects = model, optimizer, scheduler, loader
    prepared = list(objects)

    def prepare() -> None:
        prepared[:] = accelerator.prepare(*objects)

    counted = [count_calls(prepare)]
    model, optimizer, scheduler, loader = prepared  # type: ignore[assignment]
    batches = iter(loader)

    def step(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):  # replicas are compared in some of the first steps
        step(model(*next(batches)).sum())
    loss = model(*next(batches)).sum()
    counted.append(count_calls(lambda: step(loss)))
    counted.append(count_calls(lambda: next(batches)))
    counted.append(count_calls(lambda: accelerator.save_state(folder, blocking=False)))
    accelerator.wait_for_checkpoint()
    counted.append(count_calls(lambda: accelerator.load_state(folder)))
    batches.close()  # type: ignore[attr-defined]
    return counted


def launch() -> Calls:
    """Counts a launch of processes that do nothing, in the process of the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text("from accelerate import PartialState\nPartialState()\n")
        flags = ["--cpu", "--num_processes", str(RANKS), "--main_process_port", "0", str(script)]
        args = [launch_command_parser().parse_args(flags) for _ in range(2)]
        return [count_calls(partial(launch_command, each)) for each in args][-1]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        (trained,) = start(train, RANKS, folder)
    print(f"{'journey':50}{'functions':>10}{'files':>7}  goal")
    missed = 0
    for (name, goal), calls in zip(GOALS.items(), [create(), *trained, launch()], strict=True):
        missed += calls.files > goal
        verdict = "  MISSED" if calls.files > goal else ""
        print(f"{name:50}{calls.functions:>10}{calls.files:>7}  <= {goal}{verdict}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
