"""Train a small convolutional network on handwritten digits, unchanged on one process or many.

    python examples/digits.py
    accelerate launch --cpu --num_processes 2 examples/digits.py
    accelerate launch --mixed_precision bf16 examples/digits.py
    torchrun --nproc_per_node 2 examples/digits.py

Only the five marked lines differ from a plain PyTorch loop. `set_seed`, `tqdm` and `accelerator.print` are
optional: they give the same seed on all ranks, and one progress bar and one line of output for any number of
processes. The script raises an error if fewer than 96 % of the test images are recognised.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator  # (1)
from accelerate.utils import set_seed, tqdm

WANTED_ACCURACY = 0.96
HELD_OUT = 360  # of 1797 images


def load_images() -> tuple[DataLoader, DataLoader]:
    """Load the 8 x 8 grey images of scikit-learn: a training loader and a test loader."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    split = torch.Generator().manual_seed(0)
    train, test = random_split(dataset, [len(dataset) - HELD_OUT, HELD_OUT], generator=split)
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)


def build_model() -> nn.Module:
    """Two convolutions with pooling, then a linear layer with one output for each digit."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 2 * 2, 10),
    )


def train(num_epochs: int) -> float:
    """Train and return the accuracy on the test images, the same on every rank."""
    accelerator = Accelerator()  # (2)
    set_seed(42)

    train_loader, test_loader = load_images()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    num_steps = num_epochs * len(train_loader)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.02, total_iters=num_steps)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(  # (3)
        model, optimizer, train_loader, test_loader, scheduler
    )

    loss_of = nn.CrossEntropyLoss()
    accelerator.print(f"{accelerator.num_processes} process(es) on {accelerator.device.type}")
    for _ in tqdm(range(num_epochs), desc="epochs"):
        model.train()
        for images, labels in train_loader:
            loss = loss_of(model(images), labels)
            accelerator.backward(loss)  # (4)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    num_right = num_images = 0
    for images, labels in test_loader:
        with torch.no_grad():
            guesses = model(images).argmax(dim=1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))  # (5)
        num_right += int((guesses == labels).sum())
        num_images += len(labels)
    accelerator.print(f"{num_right} of {num_images} held-out images recognised: {num_right / num_images:.2%}")
    return num_right / num_images


def main() -> None:
    parser = argparse.ArgumentParser(description="Recognise handwritten digits.")
    parser.add_argument("--num_epochs", type=int, default=30, help="passes over the images (default: 30)")
    accuracy = train(parser.parse_args().num_epochs)
    if accuracy < WANTED_ACCURACY:
        raise SystemExit(f"{accuracy:.2%} is under the {WANTED_ACCURACY:.0%} that this net should reach")


if __name__ == "__main__":
    main()
