"""Observers of the values of a step and of the exchange of gradients, which the step clock records."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from accelerate import ops, torch_private
from accelerate.state import GradientState, step_clock


def local_scalar(value: object) -> torch.Tensor | None:
    """Returns a tensor of one element as this rank has it, detached, or None for other values.

    A distributed tensor that is not replicated has no value here, because its value needs a collective.
    """
    if not isinstance(value, torch.Tensor):
        return None
    tensor: Any = value.detach()
    if ops.is_dtensor(tensor):
        if not all(placement.is_replicate() for placement in tensor.placements):
            return None
        tensor = ops.local_tensor(tensor)
    is_number = tensor.numel() == 1 and not tensor.is_complex() and not tensor.is_meta
    return tensor if is_number else None


class StepValues:
    """Observer that keeps the loss and the norm of the gradients of steps that are recorded."""

    def loss_computed(self, loss: object) -> None:
        """Keeps a loss."""
        if step_clock.wanted:
            step_clock.keep("loss", local_scalar(loss))

    def norm_computed(self, norm: object) -> None:
        """Keeps a norm."""
        if step_clock.wanted:
            step_clock.keep("gradient_norm", local_scalar(norm))


class GradientExchanges:
    """Observer that finds out when a backward pass begins to wait for the gradients of other ranks.

    Callbacks at the end of a backward pass run in the order in which they are queued. One that is queued with
    the gradient of the loss runs before the callbacks of the wrappers, which wait.

    Args:
        gradients: State that knows whether this micro-batch synchronizes gradients.
    """

    def __init__(self, gradients: GradientState) -> None:
        self._gradients = gradients

    def before_backward(self, loss: torch.Tensor, arguments: object) -> None:
        """Adds a hook to a loss whose backward pass synchronizes gradients."""
        if self._gradients.sync_gradients and loss.requires_grad and get_ident() == step_clock.owner:
            loss.register_hook(_queue_callback)  # type: ignore[no-untyped-call]


def _queue_callback(gradient: torch.Tensor) -> None:
    torch_private.autograd_engine.queue_callback(step_clock.end_gradients)
