"""The interface of a number format; the base class is full precision and does nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from accelerate.base import FP8BackendType


class ScaledOptimizer(Protocol):
    """What a number format needs of a prepared optimizer."""

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    gradients_unscaled: bool


class Precision:
    """Full precision: the null case of every number format.

    A strategy calls, in this order and on every rank: `initialize` for each `prepare` call, `convert` once
    for each prepared model, `autocast` where the user opens a context, `backward` for each loss, `unscale`
    before gradients are read or clipped.

    Args:
        name: the value users give as `mixed_precision`.
    """

    scaler: torch.amp.GradScaler | None = None
    fp8_backend: FP8BackendType = FP8BackendType.NO
    """The library whose layers compute in FP8."""

    def __init__(self, name: str = "no") -> None:
        self.name = name

    def check(self, model: nn.Module) -> None:
        """Refuse a model that cannot train in this format."""

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return the new models and optimizers of a `prepare` call, as this format changes them together."""
        return models, optimizers

    def convert(self, model: nn.Module) -> nn.Module:
        """Return `model`, on its device, ready to run its forward in this format; the same object."""
        return model

    def autocast(
        self, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which operations run in this format, unless it is not enabled."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of `loss`, a 0-d tensor that is already divided by the accumulation steps."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Iterable[ScaledOptimizer]) -> None:
        """Bring the gradients of `optimizers` to their true size, once for each update."""

    def gradient_scale(self) -> float:
        """Return the factor by which gradients are too large before `unscale`."""
        return 1.0

    def adopt(self, optimizers: list[Any]) -> None:
        """Take note of all optimizers that step in this format."""
