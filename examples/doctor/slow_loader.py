"""Train in a run that waits for its data: reading a sample takes longer than training on it.

    accelerate launch --cpu --step_times examples/doctor/slow_loader.py
    accelerate launch --cpu --step_times examples/doctor/slow_loader.py --num_workers 4

The last lines of the output say where the time went, and that the run is data-bound. With workers, which read
while the model trains, it is not.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator


class SlowImages(Dataset):
    """Random images; reading one takes some milliseconds, as decoding a file does."""

    def __init__(self, length: int, milliseconds: float) -> None:
        self.length = length
        self.seconds = milliseconds / 1000

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((3, 32, 32), index / self.length), index % 10


def build_model() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 10),
    )


def train(project: Path, samples: int, milliseconds: float, num_workers: int) -> None:
    accelerator = Accelerator(project_dir=project)
    loader = DataLoader(SlowImages(samples, milliseconds), batch_size=8, num_workers=num_workers)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_of = nn.CrossEntropyLoss()
    for images, labels in loader:
        accelerator.backward(loss_of(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with a loader that is too slow.")
    parser.add_argument("--project", type=Path, default=Path("runs/slow_loader"), help="folder of the run")
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--milliseconds", type=float, default=4.0, help="to read one sample (default: 4)")
    parser.add_argument("--num_workers", type=int, default=0)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
