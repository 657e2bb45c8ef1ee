"""A custom trainer, as in small research projects: one class that holds an Accelerator.

It cycles over a loader, accumulates in its own loop, keeps an average of the weights, measures and saves on
the main process, and resumes from its checkpoint.

Usage: by_hand.py FOLDER [NAME=JSON ...] with arguments of the trainer.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Digits(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.images = torch.tensor(load_digits().images[:count], dtype=torch.float32)[:, None] / 8 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> Tensor:
        return self.images[place]


class Denoiser(nn.Module):
    """Tell the noise on a picture; its forward gives the loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1)
        )

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(images + noise), noise)


class Average(nn.Module):
    """Weights averaged over the steps."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.online = [model]  # in a list: not a submodule
        self.averaged = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        for mean, new in zip(self.averaged.parameters(), self.online[0].parameters(), strict=True):
            mean.lerp_(new.to(mean.device), 1 - self.decay)

    def forward(self, *inputs: Tensor) -> Any:
        return self.averaged(*inputs)


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        data: Dataset[Tensor],
        folder: Path,
        batch: int = 8,
        accumulated: int = 2,
        steps: int = 6,
        split_batches: bool = True,
        amp: bool = False,
        mixed_precision: str = "bf16",
    ) -> None:
        self.accelerator = Accelerator(
            split_batches=split_batches, mixed_precision=mixed_precision if amp else "no", cpu=True
        )
        self.accumulated, self.steps, self.step, self.folder = accumulated, steps, 0, folder
        self.batch = batch
        loader = self.accelerator.prepare(DataLoader(data, batch_size=batch, shuffle=False))
        self.loader = cycle(loader)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
        if self.accelerator.is_main_process:
            self.average = Average(model)
            self.average.to(self.device)
        if self.accelerator.is_local_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self.losses: list[float] = []

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def save(self, name: str) -> None:
        if not self.accelerator.is_local_main_process:
            return
        scaler = self.accelerator.scaler
        data = {
            "step": self.step,
            "model": self.accelerator.get_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        self.accelerator.save(data, str(self.folder / name))

    def load(self, name: str) -> None:
        data = torch.load(str(self.folder / name), map_location="cpu", weights_only=True)
        self.accelerator.unwrap_model(self.model).load_state_dict(data["model"])
        self.step = data["step"]
        self.optimizer.load_state_dict(data["optimizer"])
        if self.accelerator.is_main_process:
            self.average.load_state_dict(data["average"])
        if self.accelerator.scaler is not None and data["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(data["scaler"])

    def noise(self, images: Tensor) -> Tensor:
        """The same for a picture, on every rank."""
        return torch.sin(images.flatten(1).cumsum(1) * 7).view_as(images) / 2

    def train(self, until: int) -> None:
        while self.step < until:
            total = 0.0
            self.model.train()
            for _ in range(self.accumulated):
                images = next(self.loader).to(self.device)
                with self.accelerator.autocast():
                    loss = self.model(images, self.noise(images)) / self.accumulated
                    total += loss.item()
                self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.accelerator.wait_for_everyone()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.accelerator.wait_for_everyone()
            self.step += 1
            if self.accelerator.is_main_process:
                self.average.update()
            joined = self.accelerator.gather(torch.tensor([total], device=self.device)).mean()
            self.losses.append(joined.item())
        self.accelerator.print("training complete")

    @torch.no_grad()
    def measure(self) -> list[float]:
        """Losses with the weights and with the averaged ones."""
        images = Digits(12).images.to(self.device)
        both = (self.accelerator.unwrap_model(self.model), self.average.averaged)
        return [model(images, self.noise(images)).item() for model in both]


def main() -> None:
    folder, *pairs = sys.argv[1:]
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    torch.manual_seed(0)
    trainer = Trainer(Denoiser(), Digits(64), Path(folder) / "results", **options)
    trainer.train(4)
    trainer.save("model-1.pt")
    trainer.accelerator.wait_for_everyone()
    trainer.train(6)
    after = list(trainer.losses)
    trainer.load("model-1.pt")
    trainer.train(6)
    found: dict[str, Any] = {"losses": after, "again": trainer.losses[6:]}
    if trainer.accelerator.is_main_process:
        print("FOUND " + json.dumps({**found, "measured": trainer.measure()}), flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
