"""What a loss weighs in the gradients of its window: as much as any other, or as many items as it sums.

A window is the micro-batches of one optimizer step. `Runtime.weights` is the one that counts now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from numbers import Real
from typing import Any, Protocol

import torch
from torch import nn

from accelerate import ops
from accelerate.base import StateError, wrong_value
from accelerate.state import GradientState


class Weights(Protocol):
    """How the rounds of a window are weighed."""

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call `backward` on."""


class EvenWeights:
    """Every round weighs the same: losses are means, and so is their sum. The default."""

    def __init__(self, state: GradientState) -> None:
        self._state = state

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` divided by the rounds of a window."""
        steps = self._state.num_steps
        return loss if steps == 1 else loss / steps


class CountedWeights:
    """Items are counted as rounds come, and the total is known in the last round only.

    Until then losses weigh as in the window before. When the total is known, and before the last backward
    pass exchanges anything, the accumulated gradients are rescaled, so that the exchange, the scaler,
    clipping and the optimizer read the right ones.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._factor = 1.0  # equal on all ranks at any time: ranks may exchange in each round
        self.begin()

    def begin(self) -> None:
        """Start a window."""
        self._items: list[Any] = []
        self._models: dict[int, nn.Module] = {}
        self._answer: ops.Answer | None = None

    def add(self, items: Any, models: Sequence[nn.Module]) -> None:
        """Count a round: its items on this rank (a tensor on a device is read later), and the models trained
        in it.
        """
        self._items.append(items)
        self._models.update((id(model), model) for model in models)

    def complete(self) -> None:
        """Begin to sum the items of all ranks: this is the last round. Called on all ranks."""
        self._answer = ops.reduce_async([sum_items(self._items)], "sum", "accelerate.Accelerator.accumulate")

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the factor of the window, which the first call of the last round receives."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            factor = factor_of(answer.wait()[0], self._replicas)
            if len(self._items) > 1:
                rescale_gradients(self._models.values(), factor / self._factor)
            self._factor = factor
        return loss * self._factor


_EXCHANGING: AbstractContextManager[None] = nullcontext()
"""The context of a round that exchanges gradients: it holds nothing, so one object serves all rounds."""


def exchange(
    state: GradientState,
    is_last: bool,
    models: Sequence[nn.Module],
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
) -> AbstractContextManager[Any]:
    """Return the context of one round, in which models exchange gradients if it is the last of its window."""
    if is_last or state.plugin_kwargs.get("sync_each_batch", False):
        return _EXCHANGING
    if len(models) == 1:
        return no_sync(models[0])
    contexts = ExitStack()
    for model in models:
        contexts.enter_context(no_sync(model))
    return contexts


def factor_of(total: float, replicas: int) -> float:
    """Return what turns a sum over items of one rank into its part of the mean over the window's `total`
    items, where the backward pass averages the gradients of so many replicas.
    """
    if not total:
        raise StateError(
            "The window has no items: num_items is 0 in each of its batches on all processes, so there is no "
            "mean to form. Leave batches without items out of the dataset, or count at least one in each "
            "window."
        )
    return replicas / total


def read_items(value: Any) -> float:
    """Return a number of items as a float."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    fix = "Pass how many items the loss sums over"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_value("num_items", value, f"it is a {type(value).__name__}, not a number", fix)
    items = float(value)
    if not 0 <= items < math.inf:
        raise wrong_value("num_items", value, "a count is finite and not negative", fix)
    return items


def sum_items(values: Sequence[Any]) -> float:
    """Return the sum of numbers of items; tensors on a device are waited for once, not one by one."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() == 1]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        values = torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()
    return sum(map(read_items, values))


def rescale_gradients(models: Iterable[nn.Module], factor: float) -> None:
    """Multiply the gradients of models by a factor, those of shared parameters once."""
    if factor == 1.0:
        return
    parameters = {id(p): p for model in models for p in model.parameters()}
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    with torch.no_grad():
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)


def drop_gradients(models: Iterable[nn.Module]) -> None:
    """Forget the gradients of models."""
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None
