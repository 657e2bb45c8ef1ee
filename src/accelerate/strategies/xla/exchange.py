"""Average the gradients of XLA replicas, each once for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from accelerate.devices import mark_step
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState


class Exchange:
    """Which gradients of this step are averaged over all replicas already.

    Args:
        size: number of replicas whose gradients are averaged; 1 where something else does it.
        gradients: the state of the run, which is told.
    """

    def __init__(self, size: int, gradients: GradientState) -> None:
        self.size = size
        self.gradients = gradients
        self._averaged: set[int] = set()

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average gradients in place; those that are averaged already stay as they are. Called on all ranks.

        Args:
            parameters: with their gradients.
        """
        if self.size == 1:
            return
        due = [p for p in parameters if p.grad is not None and id(p) not in self._averaged]
        if due:
            xm = import_module("torch_xla.core.xla_model")
            xm.all_reduce("sum", [p.grad for p in due], scale=1.0 / self.size)
            self._averaged.update(map(id, due))
        self.gradients.is_xla_gradients_synced = True

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Expect new gradients of these parameters.

        Args:
            parameters: that were stepped.
        """
        self._averaged.difference_update(map(id, parameters))


class XlaOptimizer(AcceleratedOptimizer):
    """Averages gradients before it steps, and lets the device compute the step where no loader does.

    Args:
        optimizer: the optimizer to wrap.
        exchange: averages.
        device_placement: whether its state is moved to the device of the run.
        scaler: the gradient scaler of float16 training.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(optimizer, device_placement, scaler)
        self.exchange = exchange

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; does nothing while gradients accumulate.

        Args:
            closure: as in `AcceleratedOptimizer.step`; its gradients are averaged each time it is called.

        Returns:
            What the inner optimizer returns; `None` when the step was left out.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if closure is None:
            self.exchange.average(self.parameters())
            result = super().step()
        else:
            result = super().step(self._averaging(closure))
        self.exchange.forget(self.parameters())
        if not self.gradient_state.in_dataloader:  # a loader of torch_xla marks each batch
            mark_step()
        return result

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            self.exchange.forget(self.parameters())
            self.exchange.average(self.parameters())
            return loss

        return averaged
