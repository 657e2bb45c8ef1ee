"""Train in a run whose last rank computes more slowly than the others.

    accelerate launch --cpu --step_times --num_processes 2 examples/doctor/slow_rank.py

All ranks wait for the slow one in each exchange of gradients, so all of them are equally slow seen from
outside. The last lines of the output name the rank. `--slowdown 0` makes all ranks equal.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator


class Block(nn.Module):
    """Two layers; on a slow rank it takes longer, as on a device with a low clock."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layers(inputs)


def train(project: Path, steps: int, milliseconds: float, slowdown: float) -> None:
    accelerator = Accelerator(project_dir=project)
    factor = 1 + slowdown if accelerator.is_last_process else 1
    model = Block(64, factor * milliseconds / 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        outputs = model(torch.randn(32, 64, device=accelerator.device))
        accelerator.backward(outputs.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with one rank that is too slow.")
    parser.add_argument("--project", type=Path, default=Path("runs/slow_rank"), help="folder of the run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a forward pass (default: 20)")
    parser.add_argument("--slowdown", type=float, default=1.0, help="1 for twice the time (default: 1)")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
