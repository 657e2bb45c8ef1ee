"""Training loops whose calls are in different orders, which all have the same result with failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ORDERS = (
    "plain",
    "zero first",
    "zero after forward",
    "two backward",
    "two optimizers",
    "closure",
    "clipped",
    "clipped by torch",
    "statistics",
)
REFUSED = {"gan": "after an optimizer has stepped on this batch"}
"""Orders that raise an error with replica groups, with its text."""

Fail = Callable[[str], Any]
"""Function that ends the process if it is to fail at a place."""


class Parts(NamedTuple):
    """Two models that are called one after the other, and their optimizers, of which one may step both."""

    first: Any
    second: Any
    one: Any
    two: Any


def make_parts(order: str) -> Parts:
    normalizes = order == "statistics"
    # Adam amplifies the rounding of the gradient of a bias before batch normalization, which is 0.
    enter = nn.Linear(8, 16, bias=not normalizes)
    first = nn.Sequential(enter, nn.BatchNorm1d(16) if normalizes else nn.Tanh(), nn.Linear(16, 8)).double()
    second = nn.Linear(8, 4).double()
    if order not in ("two optimizers", "gan"):
        both = [*first.parameters(), *second.parameters()]
        return Parts(first, second, torch.optim.AdamW(both, lr=0.01), None)
    one = torch.optim.AdamW(first.parameters(), lr=0.01)
    return Parts(first, second, one, torch.optim.SGD(second.parameters(), lr=0.05))


def train(order: str, accelerator: Any, parts: Parts, rows: Tensor, labels: Tensor, fail: Fail) -> None:
    """Trains on one micro-batch, inside of `accelerator.accumulate`."""
    first, second, one, two = parts

    def backward(loss: Tensor) -> None:
        loss.register_hook(lambda _: fail("backward"))
        accelerator.backward(loss)

    def loss_of(shift: float = 0.0) -> Tensor:
        return F.cross_entropy(second(first(rows + shift)), labels)

    def closure() -> Tensor:
        one.zero_grad()
        loss = loss_of()
        backward(loss)
        return loss

    if order == "closure":
        one.step(closure)
        return
    if order == "gan":
        backward(F.softplus(second(first(rows).detach())).mean() + F.softplus(-second(rows)).mean())
        two.step()
        two.zero_grad()
        backward(F.softplus(-second(first(rows))).mean())
        one.step()
        one.zero_grad()
        two.zero_grad()
        return
    optimizers = [optimizer for optimizer in (one, two) if optimizer is not None]
    if order in ("zero first", "two optimizers", "statistics"):
        for optimizer in optimizers:
            optimizer.zero_grad()
    loss = loss_of()
    if order == "zero after forward":
        one.zero_grad()
    backward(loss)
    if order == "two backward":
        fail("between")
        backward(loss_of(1.0))
    if order == "clipped":
        accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
    if order == "clipped by torch" and (
        accelerator.sync_gradients or accelerator.gradient_accumulation_steps == 1
    ):
        torch.nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
    fail("before the step")
    for optimizer in optimizers:
        optimizer.step()
    if order in ("plain", "two backward", "clipped", "clipped by torch"):
        one.zero_grad()
