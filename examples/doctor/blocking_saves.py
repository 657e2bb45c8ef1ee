"""Train in a run that waits for its checkpoints: it saves often, and each save blocks training.

    accelerate launch --cpu --step_times examples/doctor/blocking_saves.py
    accelerate launch --cpu --step_times examples/doctor/blocking_saves.py --background

The last lines of the output say which part of the time went to saves. With `--background` the files are
written while the model trains.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def train(project: Path, steps: int, save_every: int, width: int, background: bool) -> None:
    folder = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=folder)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(1, steps + 1):
        outputs = model(torch.randn(8, width, device=accelerator.device))
        accelerator.backward(outputs.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % save_every == 0:
            accelerator.save_state(blocking=not background)
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with checkpoints that block too much.")
    parser.add_argument("--project", type=Path, default=Path("runs/blocking_saves"), help="folder of the run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save_every", type=int, default=2, help="steps between checkpoints (default: 2)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--background", action="store_true", help="write while the model trains")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
