"""Unscaling of gradients before they are clipped, and optimizers that step in the backward pass.

`Accelerator.clip_grad_norm_`, `clip_grad_value_`, `unscale_gradients` and `lomo_backward` call these
functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accelerate import strategies
from accelerate.base import ConfigurationError
from accelerate.monitoring import BACKWARD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision import Precision
from accelerate.state import step_clock


def find_fused_optimizer(optimizers: Sequence[AcceleratedOptimizer]) -> AcceleratedOptimizer:
    """Returns the one optimizer that updates parameters in the backward pass (LOMO), or raises an error."""
    fused = [optimizer for optimizer in optimizers if optimizer.steps_in_backward]
    if not fused:
        raise ConfigurationError(
            "lomo_backward needs a prepared optimizer with a `fused_backward` method, and there is none. "
            "Prepare a Lomo or AdaLomo optimizer, or call `backward`."
        )
    if len(fused) > 1:
        raise ConfigurationError(
            f"{len(fused)} prepared optimizers update parameters in the backward pass, and each "
            "needs a pass of its own. Give one of them the parameters of all."
        )
    return fused[0]


def step_in_backward(
    optimizers: Sequence[AcceleratedOptimizer], loss: torch.Tensor, learning_rate: float
) -> None:
    """Runs the backward pass of the one optimizer that updates parameters in it."""
    with step_clock.phase(BACKWARD):
        find_fused_optimizer(optimizers).fused_backward(loss, learning_rate)


def unscale(precision: Precision, optimizers: Any) -> None:
    """Unscales the gradients of one optimizer or a sequence of optimizers, if there is a gradient scaler."""
    precision.unscale(optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])


def unscale_parameters(
    precision: Precision,
    optimizers: Sequence[AcceleratedOptimizer],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    are_complete: bool,
) -> tuple[Any, float]:
    """Unscales the gradients of parameters, and returns the parameters and the remaining scale.

    Gradients that are not complete yet stay scaled, so that later ones can be added to them.
    """
    parameters = strategies.as_list(parameters)
    if not are_complete:
        return parameters, precision.gradient_scale()
    ids = {id(parameter) for parameter in parameters}
    unscale(precision, [item for item in optimizers if strategies.parameter_ids([item]) & ids])
    return parameters, 1
