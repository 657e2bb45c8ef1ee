"""Backward pass of a run with its time, and the values of a step that are recorded."""

from __future__ import annotations

from typing import Any

import torch

from accelerate import ops, strategies, torch_private
from accelerate.monitoring import BACKWARD, OTHER_THREAD
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


class MeasuredBackward:
    """Backward pass of a strategy, whose time is added to the step clock.

    With several ranks it finds out when a pass begins to wait for the gradients of other ranks. Callbacks at
    the end of a backward pass run in the order in which they are queued. One that is queued with the gradient
    of the loss runs before the callbacks of the wrappers, which wait.

    Args:
        strategy: Strategy whose `backward` is called.
        gradients: State that knows whether this micro-batch synchronizes gradients.
        num_processes: World size.
    """

    def __init__(self, strategy: strategies.Strategy, gradients: GradientState, num_processes: int) -> None:
        self._strategy, self._gradients = strategy, gradients
        self._exchanges = num_processes > 1 and strategy.holds_gradients
        self._computed_at = 0.0
        self.creates_graph = False
        """Whether the last pass was one whose gradients can be differentiated again."""

    def __call__(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Computes the gradients of a loss, with the arguments of `torch.Tensor.backward`."""
        before = step_clock.switch(BACKWARD)
        self._computed_at = 0.0
        self.creates_graph = bool(kwargs) and kwargs.get("create_graph", False)
        exchanges = self._exchanges and before != OTHER_THREAD and self._gradients.sync_gradients
        if exchanges and loss.requires_grad:
            loss.register_hook(self._queue_callback)  # type: ignore[no-untyped-call]
        try:
            self._strategy.backward(loss, **kwargs)
        finally:
            step_clock.end_backward(before, self._computed_at)

    def _queue_callback(self, gradient: torch.Tensor) -> None:
        torch_private.autograd_engine.queue_callback(self._end_gradients)

    def _end_gradients(self) -> None:
        self._computed_at = step_clock.end_gradients()
