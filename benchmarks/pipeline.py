"""Measure the idle time of ranks under each schedule of a pipeline, with layers that sleep.

A layer sleeps in its forward pass, and as long for each of the gradients of its input and of its weight. Two
cores can show this, because ranks that sleep need none. The verification of the first batch is measured in
steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import PipelineConfig

SECONDS = 0.2
VERIFICATION = 2.0  # steps that are computed more in the first batch
RANKS, MICROBATCHES = 2, 8
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


class Sleep(torch.autograd.Function):
    """Identity that sleeps in its passes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, before: float, after: float) -> Tensor:
        ctx.seconds = after
        time.sleep(before)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    """Linear layer that sleeps for `seconds` in each of three passes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.seconds = seconds

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = Sleep.apply(hidden, self.seconds, self.seconds)
        weight = Sleep.apply(self.weight, 0.0, self.seconds)
        return hidden @ weight


def measure(schedule: str) -> None:
    layers = 2 * RANKS
    stages = RANKS * (PipelineConfig(schedule=schedule).stages_per_rank or 1)
    # Stages begin at layers, after the linear layer that makes the gradient of their input necessary.
    split = [str(1 + stage * layers // stages) for stage in range(1, stages)]
    config = PipelineConfig(schedule=schedule, microbatches=MICROBATCHES, split=split)
    mesh = ParallelismConfig(pp_size=RANKS, pp_handler=config)
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    torch.manual_seed(0)
    per_layer = SECONDS * RANKS / layers
    model = nn.Sequential(nn.Linear(4, 4), *(Layer(per_layer) for _ in range(layers)))
    model = accelerator.prepare(model)
    batch = (torch.randn(MICROBATCHES, 4), torch.randn(MICROBATCHES, 4))
    times = []
    for _ in range(3):
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        accelerator.forward_backward(model, batch, mse_loss)
        accelerator.wait_for_everyone()
        times.append(time.perf_counter() - start)
    busy = 3 * SECONDS * MICROBATCHES
    step = statistics.median(times[1:])
    if accelerator.is_main_process:
        print(f"{1 - busy / step:.4f} {times[0] / step - 1:.4f}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=SCHEDULES)
    chosen = parser.parse_args().schedule
    if chosen is not None:
        measure(chosen)
        return
    expected = (RANKS - 1) / (MICROBATCHES + RANKS - 1)
    print(f"{RANKS} ranks, {MICROBATCHES} micro-batches; (p - 1) / (m + p - 1) = {expected:.3f}")
    missed = False
    for schedule in SCHEDULES:
        command = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(RANKS)]
        command += ["--main_process_port", "0", __file__, "--schedule", schedule]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=environment, check=True
        )
        bubble, verification = map(float, done.stdout.splitlines()[-1].split())
        budget = 1.05 * expected + 0.005  # two barriers
        missed |= bubble > budget or verification > VERIFICATION
        print(
            f"{schedule:24} idle {bubble:6.3f}   <= {budget:.3f}   "
            f"verification {verification:.2f} steps   <= {VERIFICATION:.2f}",
            flush=True,
        )
    sys.exit(missed)


if __name__ == "__main__":
    main()
