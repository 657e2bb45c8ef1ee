"""Writes the folders beside this file: checkpoints of a small run, and what the run did behind them.

It was run with the original package, version 1.15.0, on torch 2.13.0; the tests load what it wrote.

    python write.py one_process torch
    torchrun --nproc_per_node 2 write.py two_processes safetensors
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed


class Tied(nn.Module):
    """A model whose first and last weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return logits


class Count:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Run:
    """Two models with their optimizers, a scheduler, a loader with a seeded sampler, an object."""

    def __init__(self, accelerator: Accelerator, seed: int) -> None:
        self.accelerator = accelerator
        set_seed(seed, device_specific=True)
        first, second = Tied(), nn.Linear(3, 2)
        adam = torch.optim.AdamW(first.parameters(), lr=0.01)
        sgd = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(adam, 2)
        loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
        prepared = accelerator.prepare(first, second, adam, sgd, scheduler, loader)
        self.first, self.second, self.adam, self.sgd, self.scheduler, self.loader = prepared
        self.count = Count()
        accelerator.register_for_checkpointing(self.count)

    def step(self, tokens: torch.Tensor) -> None:
        loss = self.first(tokens).sum() + self.second(torch.rand(2, 3)).square().sum()
        self.accelerator.backward(loss)
        for each in (self.adam, self.sgd, self.scheduler):
            each.step()
        self.adam.zero_grad()
        self.sgd.zero_grad()
        self.count.steps += 1

    def resume(self) -> dict[str, Any]:
        """Train two steps, and tell all that a checkpoint decides."""
        for _ in range(2):
            self.step(torch.tensor([1, 5]))
        models = [self.accelerator.unwrap_model(each) for each in (self.first, self.second)]
        return {
            "steps": self.count.steps,
            "rate": self.adam.param_groups[0]["lr"],
            "weights": [
                {name: tensor.tolist() for name, tensor in model.state_dict().items()} for model in models
            ],
            "random": [torch.rand(1).item(), float(np.random.rand()), random.random()],
        }


def main() -> None:
    name, form = sys.argv[1:]
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    run = Run(accelerator, seed=3)
    for number, (tokens,) in enumerate(run.loader):
        run.step(tokens)
        if number == 1:
            break
    folder = Path(__file__).parent / name
    accelerator.save_state(str(folder), safe_serialization=form == "safetensors")
    facts = folder.with_name(f"{name}_{accelerator.process_index}.json")
    facts.write_text(json.dumps(run.resume()))


if __name__ == "__main__":
    main()
