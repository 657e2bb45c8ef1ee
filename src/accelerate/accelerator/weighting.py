"""Weighting of losses by the number of items in the batches of a window, over all ranks.

`Accumulation` scales losses with it when items are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import ops, torch_private
from accelerate.base import StateError, wrong_value
from accelerate.state import step_clock


class ItemWeighting:
    """Weighting of losses by items that are counted batch by batch, so that the total is known at the end.

    Until then losses are scaled by about the factor of the window before. In the last batch, when the total
    is known and before gradients are exchanged, the accumulated gradients are rescaled. So the exchange, the
    scaler, clipping and the optimizer read the right gradients.

    Args:
        replicas: Number of ranks whose gradients the backward pass averages.
        num_copies: Returns the number of ranks that count the same items.
        held: Returns the gradients of the window by parameter, which may not be the `grad` of the parameter.
    """

    counts_items = True

    def __init__(
        self,
        replicas: int,
        num_copies: Callable[[], int] = lambda: 1,
        held: Callable[[], Iterable[tuple[Tensor, Tensor]]] = tuple,
    ) -> None:
        self._replicas, self._num_copies, self._held = replicas, num_copies, held
        self._factor = 1.0  # always equal on all ranks, which may exchange gradients in each batch
        self.begin()

    @property
    def last_items(self) -> float:
        """Number of items in the latest batch of this rank."""
        return read_items(self._items[-1])

    def begin(self) -> None:
        """Starts a window."""
        # A power of two rounds no gradient, so the result does not depend on the window before.
        self._factor = 2.0 ** (math.frexp(self._factor)[1] - 1)
        self._items: list[Any] = []
        self._models: dict[int, nn.Module] = {}
        self._has_loss = False
        self._reduction: ops.AsyncReduction | None = None

    def add(self, items: Any, models: Sequence[nn.Module]) -> None:
        """Adds a batch with its number of items on this rank, and the models that it trains.

        A tensor on a device is read in the last batch of the window.
        """
        self._items.append(items)
        self._models.update((id(model), model) for model in models)

    def complete(self) -> None:
        """Starts the sum of the items over all ranks in the last batch.

        Called on all ranks.
        """
        items = [sum_items(self._items)]
        self._reduction = ops.reduce_async(items, "sum", "accelerate.Accelerator.accumulate")

    def scale(self, loss: Tensor) -> Tensor:
        """Returns a loss times the factor of the window, for which the last batch waits in its first call."""
        self._has_loss = True
        self.finish()
        return loss * self._factor

    def finish(self) -> None:
        """Rescales the gradients of earlier batches in the last batch, which may have no backward pass."""
        if self._reduction is None:
            return
        reduction, self._reduction = self._reduction, None
        total = reduction.wait()[0]
        if not (total or self._has_loss):
            return  # there is nothing to rescale
        step_clock.items += total / self._num_copies()
        factor = factor_of(total, self._replicas)
        if len(self._items) > 1:
            rescale_gradients(self._models.values(), factor / self._factor, self._held())
        self._factor = factor

    def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the last batch, in which other ranks may not take part after an error."""
        if kind is None:
            self.finish()


def factor_of(total: float, replicas: int) -> float:
    """Returns the factor of a sum over the items of one rank in the mean over all items of a window.

    Args:
        replicas: Number of ranks whose gradients the backward pass averages.
    """
    if not total:
        raise StateError(
            "The window has no items: num_items is 0 in each of its batches on all processes, so it has no "
            "mean. Leave batches without items out of the dataset, or count at least one in each "
            "window."
        )
    return replicas / total


def read_items(value: object) -> float:
    """Returns a number of items as a float."""
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
    """Returns the sum of numbers of items, with one copy from the device for all tensors."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() == 1]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        values = torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()
    return sum(map(read_items, values))


def rescale_gradients(
    models: Collection[nn.Module], factor: float, held: Iterable[tuple[Tensor, Tensor]] = ()
) -> None:
    """Multiplies the gradients of models by a factor, in place, and those of shared parameters once.

    Args:
        held: Further gradients, each after its parameter, which may be the same tensors.
    """
    if factor == 1.0:
        return
    parameters = {id(p): p for p in torch_private.parameters_and_shards(models)}
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    gradients += [gradient for model in models for gradient in torch_private.unreduced_gradients(model)]
    gradients += [gradient for parameter, gradient in held if id(parameter) in parameters]
    gradients = list({id(gradient): gradient for gradient in gradients}.values())  # some units are unsharded
    with torch.no_grad():
        # torch does not multiply a list of DTensors and plain tensors
        dense = [ops.local_tensor(gradient) for gradient in gradients if not gradient.is_sparse]
        # FSDP 1 makes another view of a gradient that it has not reduced each time it sets `grad`.
        dense = list({(each.data_ptr(), each.shape): each for each in dense}.values())
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)
