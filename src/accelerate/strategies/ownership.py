"""Find training mistakes when objects are prepared: parameters nobody steps, optimizers that step nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from accelerate.base import listed
from accelerate.strategies.bundle import parameter_ids


def orphan_parameters(model: nn.Module, owned: set[int]) -> list[str]:
    """Return the names of trainable parameters of `model` that are not in `owned`."""
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned]


def find_orphans(new_models: Iterable[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Return one warning for each model that trains but is not, or not wholly, stepped by any optimizer.

    Args:
        new_models: models that are prepared in the same call as an optimizer.
        optimizers: all optimizers of the run, prepared or about to be.
    """
    owned = parameter_ids(optimizers)
    warnings = []
    for model in new_models:
        orphans = orphan_parameters(model, owned)
        if orphans:
            warnings.append(
                f"{len(orphans)} trainable parameters of {type(model).__name__} belong to no prepared "
                f"optimizer and will not change: {listed(orphans)}. Pass them to the optimizer before "
                "`prepare`, or freeze them with requires_grad_(False) if that is meant."
            )
    return warnings


def find_strangers(new_optimizers: Iterable[Any], models: Sequence[nn.Module]) -> list[str]:
    """Return one warning for each optimizer that steps no parameter of any prepared model.

    Args:
        new_optimizers: optimizers of this call.
        models: all models of the run, prepared or about to be.
    """
    known = {id(p) for model in models for p in model.parameters()}
    warnings = []
    for optimizer in new_optimizers:
        if not parameter_ids([optimizer]) & known:
            warnings.append(
                f"{type(optimizer).__name__} steps no parameter of any prepared model: was it built before "
                "the model was copied or replaced, or for a model that was not prepared? Build it from the "
                "parameters of the model that you pass to `prepare`, and pass that model too."
            )
    return warnings
