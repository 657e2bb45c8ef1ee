"""Train a diffusion model (DDPM) on the digits of scikit-learn, and sample images with averaged weights.

    accelerate launch --cpu --num_processes 2 examples/by_task/diffusion.py

`accelerator.average` keeps an exponential moving average of the weights, with which images are sampled. Each
rank samples some of them, and `gather` joins them. Needs scikit-learn.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

STEPS = 100
SIGNAL = torch.cumprod(1 - torch.linspace(1e-3, 0.1, STEPS), 0)
"""Part of the variance of the image that is left after each step of the noise."""


class Denoiser(nn.Module):
    """Predicts the noise of an image of 8 x 8 pixels at a step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.steps = nn.Embedding(STEPS, width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, images: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        wide = (self.first(images) + self.steps(steps)[:, :, None, None]).relu()
        deep = self.middle(self.down(wide).relu()).relu()
        return self.last(torch.cat([wide, self.up(deep)], 1))


@torch.no_grad()
def sample(model: nn.Module, count: int, device: torch.device) -> torch.Tensor:
    """Returns images, from noise to the first step."""
    images = torch.randn(count, 1, 8, 8, device=device)
    for step in reversed(range(STEPS)):
        left = SIGNAL[step] / SIGNAL[step - 1] if step else SIGNAL[0]
        noise = model(images, torch.full((count,), step, device=device))
        images = (images - (1 - left) / (1 - SIGNAL[step]).sqrt() * noise) / left.sqrt()
        if step:
            images += (1 - left).sqrt() * torch.randn_like(images)
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a diffusion model.")
    parser.add_argument("--num_epochs", type=int, default=30)
    arguments = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(digits, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = accelerator.average(model, decay=0.99)

    for epoch in range(arguments.num_epochs):
        for images in loader:
            noise, steps = torch.randn_like(images), torch.randint(STEPS, (len(images),)).to(images.device)
            signal = SIGNAL.to(images.device)[steps].view(-1, 1, 1, 1)
            loss = mse_loss(model(signal.sqrt() * images + (1 - signal).sqrt() * noise, steps), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean'):.3f}")

    set_seed(0, device_specific=True)  # each rank samples other images
    with average.applied():
        images = accelerator.gather(sample(model, 16, accelerator.device))
    rows = ["".join(" #"[value > 0] for value in row) for row in images[0, 0].tolist()]
    accelerator.print(f"{len(images)} images, of which this is the first:", *rows, sep="\n")


if __name__ == "__main__":
    main()
