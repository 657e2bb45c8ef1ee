"""Measure a training step of replica groups, and of DistributedDataParallel on as many processes.

Replica groups agree on their members, add up gradients after the backward pass, and vote. The figure is the
time that this adds to a step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from pairing import Pair, report

PROCESSES, STEPS, WARM_UP = 4, 400, 50
BUDGET = 0.015  # seconds
SIZE = 128


def train() -> None:
    """Trains a small model, and prints the median time of a step."""
    accelerator = Accelerator(cpu=True)
    data: Any = [(torch.randn(SIZE), torch.randn(SIZE)) for _ in range(PROCESSES * STEPS)]
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1))
    times = [time.perf_counter()]
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    steps = [late - early for early, late in zip(times, times[1:], strict=False)]
    if accelerator.is_main_process:
        print(f"seconds {statistics.median(steps[WARM_UP:])}")
    accelerator.end_training()


def launch(*options: str) -> float:
    """Returns the seconds of a step with options of the launcher."""
    command = ["-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0", *options, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--train"], capture_output=True, text=True, env=environment, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    return float(line.split()[1])


def measure() -> Pair:
    rounds = [
        (launch("--num_processes", str(PROCESSES)), launch("--replicas", str(PROCESSES))) for _ in range(3)
    ]
    plain, ours = (min(column) for column in zip(*rounds, strict=True))
    added = statistics.median(late - early for early, late in rounds)
    work = f"time that recovery without a restart adds to a step of {PROCESSES} replica groups"
    return Pair(work, plain, ours, added, BUDGET, unit="s")


if __name__ == "__main__":
    if "--train" in sys.argv:
        train()
    else:
        sys.exit(report([measure()], "Recovery without a restart, compared with DistributedDataParallel."))
