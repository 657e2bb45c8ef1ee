"""The task of the examples in this folder: recognise scikit-learn's handwritten digits.

The images have 8 x 8 pixels and are installed with scikit-learn, so an example runs in seconds.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator

HELD_OUT = 360  # of 1797 images
LEARNING_RATE = 3e-3


def load_images(batch_size: int = 16) -> tuple[DataLoader, DataLoader]:
    """Return a training loader and a test loader; a batch is (images of 64 numbers, labels)."""
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    split = torch.Generator().manual_seed(0)
    train, test = random_split(dataset, [len(dataset) - HELD_OUT, HELD_OUT], generator=split)
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=64)


def build_model() -> nn.Module:
    """Return a network with one hidden layer and one output for each digit."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the examples train with."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def measure_accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy, the same on all ranks; called on all ranks."""
    model.eval()
    num_right = num_images = 0
    for images, labels in loader:
        with torch.no_grad():
            guesses = model(images).argmax(dim=1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        num_right += int((guesses == labels).sum())
        num_images += len(labels)
    model.train()
    return num_right / num_images


def parse_arguments(description: str, num_epochs: int = 12, **more: dict) -> argparse.Namespace:
    """Parse `--num_epochs` and further options.

    Args:
        description: What the script shows.
        num_epochs: Passes over the images where the command line says nothing.
        **more: Name of an option -> arguments of `add_argument`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--num_epochs", type=int, default=num_epochs, help="passes over the images")
    for name, arguments in more.items():
        parser.add_argument(f"--{name}", **arguments)
    return parser.parse_args()
