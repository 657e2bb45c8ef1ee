"""A script as users write them: type checkers follow it from end to end without a cast."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

Batch = tuple[Tensor, Tensor]


class Numbers(Dataset[Batch]):
    """Sums of numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Batch:
        x = torch.full((4,), float(index) / 20)
        return x, x.sum()


class Net(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row."""
        y: Tensor = self.layer(x)
        return y.squeeze(-1)


def train(folder: Path, epochs: int = 2) -> list[float]:
    """Train, evaluate, save and load; return the loss of each epoch."""
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(project_dir=str(folder)),
    )
    set_seed(0)
    model = Net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    eval_loader = DataLoader(Numbers(), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    eval_loader = accelerator.prepare(eval_loader)
    assert_type(model, Net)
    assert_type(optimizer, AdamW)
    assert_type(loader, DataLoader[Batch])
    assert_type(scheduler, LambdaLR)
    losses = []
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model), accelerator.autocast():
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.log({"norm": accelerator.clip_grad_norm_(model.parameters(), 1.0).item()})
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        errors: list[Tensor] = []
        with torch.no_grad():
            for x, y in eval_loader:
                predicted, wanted = accelerator.gather_for_metrics((model(x), y))
                errors.append((predicted - wanted).square())
        losses.append(torch.cat(errors).mean().item())
        accelerator.print(f"loss {losses[-1]:.3f}, rate {scheduler.get_last_lr()[0]:.3g}")
    accelerator.wait_for_everyone()
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    accelerator.save_model(model, folder / "model")
    accelerator.save(accelerator.unwrap_model(model).layer.state_dict(), folder / "layer.safetensors", True)
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    train(Path(sys.argv[1]))
