"""Optimizers that update parameters in the backward pass (LOMO): find the one of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.base import ConfigurationError, wrong_value
from accelerate.optimizer import AcceleratedOptimizer


def the_fused(optimizers: Iterable[AcceleratedOptimizer]) -> AcceleratedOptimizer:
    """Return the one prepared optimizer that updates parameters in the backward pass.

    Args:
        optimizers: all that are prepared.

    Raises:
        ConfigurationError: there is none, or there are several, which one pass cannot serve.
    """
    found = [each for each in optimizers if each.steps_in_backward]
    if not found:
        raise ConfigurationError(
            "lomo_backward needs a prepared optimizer with a `fused_backward` method, and there is none. "
            "Prepare a Lomo or AdaLomo optimizer, or call `backward`."
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} prepared optimizers update parameters in the backward pass, and each needs a pass "
            "of its own. Give one of them the parameters of all."
        )
    return found[0]


def rate_of(optimizer: AcceleratedOptimizer) -> float:
    """Return the learning rate in the optimizer's groups, where schedulers write it."""
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments for a backward pass that the optimizer runs.

    Args:
        arguments: what `backward` was given beside the loss and the learning rate.
    """
    if arguments:
        raise wrong_value(
            ", ".join(arguments),
            list(arguments.values()),
            "an optimizer that updates parameters in the backward pass runs it without arguments",
            "Leave them out",
        )
