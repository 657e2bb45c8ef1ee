"""Names of the parameters of models and of optimizers, without wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from accelerate import torch_private
from accelerate.base import ConfigurationError

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


def clean_name(name: str) -> str:
    """Returns the name of a tensor without wrappers."""
    return ".".join(part for part in name.split(".") if part not in torch_private.WRAPPED)


def fsdp2_canonicalize_names(named_params: Mapping[str, Value]) -> dict[str, Value]:
    """Returns parameters by their names without wrappers.

    Args:
        named_params: Parameters, or any other values, by name.
    """
    return {clean_name(name): value for name, value in named_params.items()}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns all parameters of a model by name without wrappers, tied ones by each of their names."""
    return fsdp2_canonicalize_names(dict(model.named_parameters(remove_duplicate=False)))


def names_by_group(
    optimizer: torch.optim.Optimizer, named: Sequence[Mapping[str, nn.Parameter]]
) -> list[list[list[str]]]:
    """Returns the names of each parameter of each group of an optimizer, the usual one first.

    They begin with the number of the model if the optimizer steps several models.

    Args:
        named: Parameters by name of each model.
    """
    names: dict[int, list[str]] = {}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    several = sum(any(id(p) in stepped for p in parameters.values()) for parameters in named) > 1
    for index, parameters in enumerate(named):
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(f"model_{index}.{name}" if several else name)
    if unknown := len(stepped - set(names)):
        raise ConfigurationError(
            f"{type(optimizer).__name__} steps {unknown} parameters that no prepared model has, and in "
            "shards the states of parameters are known by their names. Prepare the model, too, or save whole "
            "states: FSDP_STATE_DICT_TYPE=FULL_STATE_DICT."
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
