"""Loops with windows of several micro-batches compute the updates of plain torch, in any order of the calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.base import ConfigurationError, StateError
from accelerate.state import AcceleratorState

pytestmark = pytest.mark.usefixtures("states")

SAMPLES, BATCH = 22, 2
ORDERS = (
    *("fbcsZ", "Zfbcs", "fZbcs", "fbcsz", "zfbcs", "fzbcs", "fbcsZz"),
    *("fbcSZ", "ZfbcS", "fbcsG", "fbcSG", "ZfbcsZ", "zZfbcsz", "fbcSz"),
)
"""Statements of a loop body: f forward, b backward, c clip, s step, Z optimizer.zero_grad, z model.zero_grad.

S and G are step and zero_grad where gradients are synchronized.
"""


def new_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def new_loader(samples: int = SAMPLES, batch: int = BATCH, columns: int = 2) -> DataLoader[Any]:
    torch.manual_seed(0)
    data = torch.randn(64, 4).double()[:samples], torch.randn(64, columns).double()[:samples]
    return DataLoader(TensorDataset(*data), batch_size=batch)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def weights(*models: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def expected(
    window_of: Callable[[int], int], clip: float | None = None, epochs: int = 2, divides_by_size: bool = True
) -> Tensor:
    """Weights after training with plain torch; `window_of(n)` is the number of micro-batches of window n."""
    model, loader = new_model(), new_loader()
    optimizer, count = sgd(model), itertools.count()
    for _ in range(epochs):
        batches = list(loader)
        while batches:
            size = window_of(next(count))
            window, batches = batches[:size], batches[size:]
            size = len(window) if divides_by_size else size
            for x, y in window:
                (mse_loss(model(x), y) / size).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def run_body(body: str, accelerator: Accelerator, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = None
    for statement in body:
        if statement == "f":
            loss = mse_loss(model(x), y)
        elif statement == "b":
            accelerator.backward(loss)
        elif statement == "c":
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
        elif statement == "z":
            model.zero_grad()
        elif statement == "s" or (statement == "S" and accelerator.sync_gradients):
            optimizer.step()
        elif statement == "Z" or (statement == "G" and accelerator.sync_gradients):
            optimizer.zero_grad()


def trained(body: str, steps: int, way: str = "accumulate") -> Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), new_loader())
    for _ in range(2):
        if way == "windows":
            for window in accelerator.windows(loader):
                for x, y in window:
                    run_body(body, accelerator, model, optimizer, x, y)
            continue
        for x, y in loader:
            items = {"num_items": 1} if way == "items" else {}
            with accelerator.accumulate(model, **items):
                run_body(body, accelerator, model, optimizer, x, y)
    AcceleratorState._reset_state(True)
    return weights(model)


@pytest.mark.parametrize("way", ["accumulate", "items", "windows"])
def test_the_order_of_calls_does_not_change_the_updates(way: str) -> None:
    wrong = []
    for steps in (1, 2, 4):
        for clip in (None, 0.05):
            # `accumulate` divides the losses of the last, shorter window as those of all others.
            right = expected(lambda n, steps=steps: steps, clip, divides_by_size=way != "accumulate")
            for order in ORDERS:
                body = order if clip else order.replace("c", "")
                found = trained(body, steps, way)
                if not torch.allclose(found, right, rtol=0, atol=1e-12):
                    wrong.append((steps, clip, body, float((found - right).abs().max())))
    assert not wrong
