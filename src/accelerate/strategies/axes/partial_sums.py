"""Sums over the positions of a rank in a loss, of which the gradients of all ranks are averaged.

The average is the gradient of a loss of whole sequences if the loss has the same derivative by the sums of
all ranks. It has not if each rank divides by a number of its own, such as that of the tokens in its part. So
the derivatives of some steps are recorded in the backward pass, and compared after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError
from accelerate.ops import gather_in_group
from accelerate.strategies.axes.sequence_shards import SequenceRanks
from accelerate.strategies.tolerances import TOLERANCES, must_compare

MAX_RECORDED = 1000
"""Sums of a step that are compared."""
_SUMS = (torch.sum, Tensor.sum)
_MEANS = (torch.mean, Tensor.mean)


class PartialSums:
    """Derivatives of a loss by the sums over positions of this rank, outside of models."""

    def __init__(self) -> None:
        self._num_forwards = 0  # that run now
        self._num_steps = 0
        self._derivatives: list[Tensor] = []

    def add_model(self, model: nn.Module) -> None:
        """Leaves out the sums that a model computes in its forward."""
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._num_forwards += 1

    def _end(self, model: nn.Module, args: Any, outputs: Any) -> None:
        self._num_forwards -= 1

    def watch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: object,
        length: int,
    ) -> None:
        """Records the derivative by the output of a function in the backward pass, if it is such a sum.

        Args:
            length: Number of positions of this rank.
        """
        if self._num_forwards or not isinstance(output, Tensor) or not output.requires_grad:
            return
        values = args[0] if args else None
        if not isinstance(values, Tensor) or not must_compare(self._num_steps + 1):
            return
        is_loss = getattr(func, "__module__", "") == nn.functional.__name__
        is_mean = func in _MEANS or (is_loss and kwargs.get("reduction", "mean") == "mean")
        if not (is_mean or func in _SUMS or (is_loss and kwargs.get("reduction") == "sum")):
            return
        is_whole = values.ndim > 0 and output.ndim == 0
        is_of_rows = not is_loss and values.ndim > 1 and values.shape[1] == length
        if not (is_whole or (is_of_rows and _dim(args, kwargs) in (1, 1 - values.ndim))):
            return
        divisor = values.numel() // max(output.numel(), 1) if is_mean else 1
        output.register_hook(partial(self._record, divisor))  # type: ignore[no-untyped-call]

    def _record(self, divisor: int, gradient: Tensor) -> None:
        if len(self._derivatives) < MAX_RECORDED:  # also if no step ever ends by accelerator.backward
            self._derivatives.append(gradient.detach().flatten().double().cpu() / divisor)

    def compare(self, ranks: SequenceRanks) -> None:
        """Raises an error if the derivatives of the ranks differ.

        Called on all ranks after the backward pass of a step.

        Raises:
            ConfigurationError: The derivatives differ.
        """
        self._num_steps += 1
        found, self._derivatives = self._derivatives, []
        if not must_compare(self._num_steps):
            return
        for each in zip(*gather_in_group(found, ranks.group), strict=False):
            first = each[0]
            if any(other.shape != first.shape for other in each):
                continue
            norms = [float(other.norm()) for other in each]
            if any(float((other - first).norm()) > TOLERANCES["no"].relative * max(norms) for other in each):
                shown = [f"{float(other.mean()):.4g}" for other in each]
                raise ConfigurationError(
                    "The loss has different derivatives by the sums over positions of the ranks that divide "
                    f"sequences ({', '.join(shown)}), so the average of their gradients is not that of whole "
                    "sequences. A mean over some tokens divides by the number on each rank. Divide by "
                    "accelerator.reduce(number, 'mean') instead, or use a mean of cross_entropy or "
                    "accelerator.lm_loss."
                )


def _dim(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the dimension that a sum or mean reduces, or None for several or all."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    return dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
