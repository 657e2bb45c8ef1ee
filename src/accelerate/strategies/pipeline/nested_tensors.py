"""Tensors in nested arguments and outputs of modules, and their shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import PreparationError
from accelerate.nested import TensorInformation


def signature_of(values: object) -> tuple[Any, ...]:
    """Returns the shapes and dtypes of the tensors in nested values, with the other values as text."""
    leaves, tree = flatten(values)
    described = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return (*described, str(tree))


def flatten(values: object) -> tuple[list[Any], Any]:
    """Returns the leaves of nested values and their structure, in which dataclasses with tensors are nodes.

    Raises:
        PreparationError: Another object has tensors as attributes, in which they cannot be found.
    """
    leaves, tree = torch_private.pytree.tree_flatten(values)
    kinds = dict.fromkeys(type(leaf) for leaf in leaves if _has_tensors(leaf))
    if not kinds:
        return leaves, tree
    for kind in kinds:
        if not dataclasses.is_dataclass(kind) or any(not each.init for each in dataclasses.fields(kind)):
            raise PreparationError(
                f"An object of type {kind.__name__} has tensors as attributes, and a pipeline finds tensors "
                "in dicts, lists, tuples and dataclasses only. Use one of these for the arguments and "
                "outputs of the model and of its layers."
            )
        torch_private.pytree.register_dataclass(kind)
    return flatten(values)


def _has_tensors(value: object) -> bool:
    if isinstance(value, (Tensor, nn.Module, type)):
        return False
    return any(isinstance(each, Tensor) for each in getattr(value, "__dict__", {}).values())


_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice))


def tensors_in(values: Any) -> list[Tensor]:
    kind = type(values)
    if kind in _PLAIN:
        return []
    if isinstance(values, Tensor):
        return [values]
    if kind is tuple or kind is list:  # arguments of functions, of which a trace has many
        return [tensor for value in values for tensor in tensors_in(value)]
    if kind is dict:
        return [tensor for value in values.values() for tensor in tensors_in(value)]
    return [leaf for leaf in flatten(values)[0] if isinstance(leaf, Tensor)]


def specs_of(values: object) -> Any:
    """Returns nested values with specs in place of tensors."""
    leaves, tree = flatten(values)
    specs = [
        TensorInformation(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    return torch_private.pytree.tree_unflatten(specs, tree)


def to_zeros(specs: object, device: torch.device) -> Any:
    """Returns a value with zeros in place of specs."""
    return torch_private.pytree.tree_map_only(
        TensorInformation, lambda spec: torch.zeros(spec.shape, dtype=spec.dtype, device=device), specs
    )
