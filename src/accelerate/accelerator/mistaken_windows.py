"""Warnings about loops that accumulate gradients in one place and not in another."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from accelerate.logging import get_logger
from accelerate.state import GradientState
from accelerate.strategies import Prepared, parameter_ids

logger = get_logger(__name__)

NUM_SHORT_STEPS = 2
"""Number of successive steps of too few micro-batches that are a mistake, unlike one at the end of a pass."""


class UndividedSteps:
    """Finds loops without `accumulate` that step more often than their losses are divided for."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._num_updates = self._num_losses = self._num_short = 0

    def count_loss(self, num_steps: int) -> None:
        """Counts a loss that is divided by `num_steps`, and logs one warning."""
        if self._num_short >= NUM_SHORT_STEPS:
            return
        num_updates = sum(optimizer.num_updates for optimizer in self._prepared.optimizers)
        if num_updates != self._num_updates:
            is_short = 0 < self._num_losses < num_steps
            self._num_short = self._num_short + 1 if is_short else 0
            self._num_updates, self._num_losses = num_updates, 0
        self._num_losses += 1
        if self._num_short >= NUM_SHORT_STEPS:
            logger.warning(
                f"backward() divides the loss by gradient_accumulation_steps={num_steps}, and the optimizer "
                "steps after fewer micro-batches, so its gradients are too small. Put the body of the loop "
                "into `with accelerator.accumulate(model):`, or use gradient_accumulation_steps=1."
            )


def watch_unprepared_steps(
    gradients: GradientState, prepared: Prepared, models: Sequence[nn.Module]
) -> RemovableHandle:
    """Logs a warning when an optimizer that was not prepared steps in a micro-batch that is not the last.

    Args:
        gradients: State that says whether the current micro-batch is the last one.

    Returns:
        A handle that ends the watch.
    """
    trained = {id(parameter) for model in models for parameter in model.parameters()}
    known = weakref.WeakSet(getattr(optimizer, "optimizer", optimizer) for optimizer in prepared.optimizers)

    def check(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (
            vars(gradients).get("sync_gradients", True)
            or optimizer in known
            or trained.isdisjoint(parameter_ids([optimizer]))
        ):
            return
        known.add(optimizer)
        logger.warning(
            f"{type(optimizer).__name__} was not passed to accelerator.prepare(), so it steps in each "
            "micro-batch and not only at the end of each window of accumulate(). Prepare it, or call its "
            "step() and zero_grad() if accelerator.sync_gradients is True."
        )

    return register_optimizer_step_pre_hook(check)
