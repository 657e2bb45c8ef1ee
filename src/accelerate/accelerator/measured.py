"""What the clock takes from training: the time of backward passes, and values of a step."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from accelerate import ops, strategies, torch_private
from accelerate.monitoring import BACKWARD
from accelerate.state import GradientState, step_clock


def local_scalar(value: object) -> torch.Tensor | None:
    """Return a tensor of one element as this rank holds it, detached; None for anything else.

    A distributed tensor that is not replicated has no value here: to compute it is a collective.
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
    """Takes the place of the backward pass of a strategy in steps that are measured.

    With several ranks it finds out from when on a pass waits for the exchange of gradients: callbacks at the
    end of a pass run in the order in which they are queued, and one that is queued with the gradient of the
    loss runs before those of the wrappers, which wait.
    """

    def __init__(self, strategy: strategies.Strategy, gradients: GradientState, num_processes: int) -> None:
        self._strategy, self._gradients, self._plain = strategy, gradients, strategy.backward
        self._exchanges = num_processes > 1 and strategy.holds_gradients
        self._computed_at = 0.0
        step_clock.add_hook(self)

    def set(self, is_measured: bool) -> None:
        self._strategy.backward = self if is_measured else self._plain  # type: ignore[method-assign]

    def __call__(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if get_ident() != step_clock.owner:  # another thread than the one that trains
            self._plain(loss, **kwargs)
            return
        before = step_clock.switch(BACKWARD)
        self._computed_at = 0.0
        if self._exchanges and self._gradients.sync_gradients and loss.requires_grad:
            loss.register_hook(self._queue)  # type: ignore[no-untyped-call]
        self._plain(loss, **kwargs)
        step_clock.end_backward(before, self._computed_at)

    def _queue(self, gradient: torch.Tensor) -> None:
        torch_private.autograd_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._computed_at = step_clock.end_gradients()
