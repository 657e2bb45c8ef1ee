"""Warnings about models and optimizers that do not belong together.

`Strategy.check` logs them before `prepare` changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from accelerate.base import listed
from accelerate.strategies.bundle import parameter_ids


def find_unstepped_models(models: Iterable[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Returns a warning for each model with trainable parameters that no optimizer steps."""
    owned = parameter_ids(optimizers)
    warnings = []
    for model in models:
        listed_by_model = {id(p) for p in model.parameters()}  # a model may hide those of another optimizer
        names = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) in listed_by_model and id(p) not in owned
        ]
        if names:
            warnings.append(
                f"{len(names)} trainable parameters of {type(model).__name__} belong to no prepared "
                f"optimizer and will not change: {listed(names)}. Pass them to the optimizer before "
                "`prepare`, or freeze them with requires_grad_(False) if that is meant."
            )
    return warnings


def find_unrelated_optimizers(
    optimizers: Iterable[Any], models: Sequence[nn.Module], stepped: set[int] | None = None
) -> list[str]:
    """Returns a warning for each optimizer that steps no parameter of any prepared model.

    Args:
        optimizers: The optimizers to check.
        models: All prepared models.
        stepped: Ids of all parameters that prepared optimizers step, on one process. There an optimizer of
            other parameters is a mistake only if a model has trainable parameters that no optimizer steps.
            None on several processes, where gradients of other parameters are not averaged.
    """
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    known = {id(tensor) for model in models for tensor in _registered_tensors(model)} | set(map(id, trained))
    if stepped is not None and all(id(p) in stepped for p in trained):
        return []
    return [
        f"{type(optimizer).__name__} steps no parameter of any prepared model: was it built before "
        "the model was copied or replaced, or for a model that was not prepared? Build it from the "
        "parameters of the model that you pass to `prepare`, and pass that model too."
        for optimizer in optimizers
        if (ids := parameter_ids([optimizer])) and not ids & known
    ]


def _registered_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yields all parameters and buffers of a model, also those that an overridden `parameters` hides."""
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        waiting += [child for child in module._modules.values() if child is not None]
