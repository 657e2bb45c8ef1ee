"""What a loss weighs in the gradients of its window: as much as any other, or as many items as it sums.

A window is the micro-batches of one optimizer step. `Runtime.weights` is the one that counts now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from accelerate import ops
from accelerate.base import StateError, wrong_value
from accelerate.state import GradientState


class EvenWeights:
    """Every round weighs the same: losses are means, and so is their sum. The null case.

    Args:
        state: knows how many rounds a window has.
    """

    def __init__(self, state: GradientState) -> None:
        self._state = state

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` divided by the rounds of a window."""
        steps = self._state.num_steps
        return loss if steps == 1 else loss / steps


class KnownWeights:
    """The window's items are counted: a loss that sums over items weighs by the mean over all of them.

    Args:
        factor: what turns a sum of this rank into its part of the mean over all ranks.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the factor."""
        return loss * self._factor


class CountedWeights:
    """Items are counted as rounds come, and the total is known in the last round only.

    Until then losses weigh as in the window before. When the total is known, and before the last backward
    pass exchanges anything, what has accumulated is brought to the right size, so that whoever looks at
    gradients afterwards (the exchange, the scaler, clipping, the optimizer) sees the right ones.

    Args:
        replicas: number of processes whose gradients the backward pass averages.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._factor = 1.0  # equal on all ranks at any time: ranks may exchange in each round
        self._items: list[Any] = []
        self._models: dict[int, nn.Module] = {}
        self._answer: ops.Answer | None = None

    def begin(self) -> None:
        """Start a window."""
        self._items.clear()
        self._models.clear()
        self._answer = None

    def add(self, items: Any, models: Sequence[nn.Module]) -> None:
        """Count a round.

        Args:
            items: how many its losses sum over on this rank; a tensor on a device is read later.
            models: those that are trained in it.
        """
        self._items.append(items)
        self._models.update((id(model), model) for model in models)

    def complete(self) -> None:
        """Begin to sum the items of all ranks: this is the last round. Called on all ranks."""
        self._answer = ops.reduce_async([sum_items(self._items)], "sum", "accelerate.Accelerator.accumulate")

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the factor of the window, which the first call of the last round finds out."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._set_total(answer.wait()[0])
        return loss * self._factor

    def _set_total(self, total: float) -> None:
        factor = factor_of(total, self._replicas)
        if len(self._items) > 1:
            rescale_gradients(self._models.values(), factor / self._factor)
        self._factor = factor


Weights = EvenWeights | KnownWeights | CountedWeights


def factor_of(total: float, replicas: int) -> float:
    """Return what turns a sum over items of one rank into its part of the mean, when ranks are averaged.

    Args:
        total: items of the window on all ranks.
        replicas: number of processes whose gradients the backward pass averages.

    Raises:
        StateError: there are no items.
    """
    if not total:
        raise StateError(
            "The window has no items: num_items is 0 in each of its batches on all processes, so there is no "
            "mean to form. Leave batches without items out of the dataset, or count at least one in each "
            "window."
        )
    return replicas / total


def read_items(value: Any) -> float:
    """Return a number of items as a float.

    Raises:
        ConfigurationError: it is no number, negative, or not finite.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        reason = f"it is a {type(value).__name__}, not a number"
        raise wrong_value("num_items", value, reason, "Pass how many items the loss sums over")
    items = float(value)
    if not 0 <= items < math.inf:
        raise wrong_value(
            "num_items", value, "a count is finite and not negative", "Pass how many items the loss sums over"
        )
    return items


def sum_items(values: Sequence[Any]) -> float:
    """Return the sum of numbers of items; tensors on a device are waited for once, not one by one.

    Args:
        values: numbers, or tensors that hold one each.

    Raises:
        ConfigurationError: one of them is no number, negative, or not finite.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() == 1]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        values = torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()
    return sum(map(read_items, values))


def rescale_gradients(models: Iterable[nn.Module], factor: float) -> None:
    """Multiply the gradients of models by a factor, those of shared parameters once.

    Args:
        models: their parameters count; those without a gradient are left alone.
        factor: of all gradients.
    """
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
