"""Changes that layers make besides their outputs, which may explain another result of a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from accelerate import torch_private
from accelerate.strategies.pipeline.nested_tensors import tensors_in

OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}
"""Attributes that torch adds to each module, without those with weights."""


def observe(name: str, module: nn.Module, changes: dict[str, None]) -> None:
    """Adds each change by the forwards of a module to `changes` from now on, once and in order."""
    known: dict[str, Any] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        nonlocal known
        known = dict(_values_of(name, module, args, kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: object) -> None:
        nonlocal known
        for text, value in _values_of(name, module, args, kwargs):
            if not _is_same(known.get(text), value):
                changes[text] = None
        known = {}  # frees the values

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True, prepend=True)


def _values_of(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields attributes, buffers and arguments of a module with their values and the state of the values."""
    for inner, part in module.named_modules(prefix=name):
        for key, value in {**vars(part), **part._buffers}.items():
            if key not in OF_MODULES and key not in ("_parameters", "_buffers"):
                kind = "buffer" if key in part._buffers else "attribute"
                yield f"{inner} sets the {kind} {key}", _state_of(value)
    try:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # of another signature, or of a function without one
        return
    for key, value in arguments.items():
        yield f"{name} changes its argument {key}", _state_of(value)


def _state_of(value: object) -> tuple[Any, tuple[Any, ...]]:
    """Returns a value with its length and the versions of its tensors."""
    length = len(value) if isinstance(value, (list, dict)) else None
    tensors = tensors_in(value) if isinstance(value, (Tensor, list, tuple, dict)) else []
    # Tensors of inference mode do not count their changes.
    return value, (
        length,
        *(torch_private.in_place_version(each) for each in tensors if not each.is_inference()),
    )


def _is_same(old: Any, new: Any) -> bool:
    if old is None or old[1] != new[1]:
        return False
    plain = (bool, int, float, str)
    return old[0] is new[0] or (
        isinstance(old[0], plain) and type(old[0]) is type(new[0]) and old[0] == new[0]
    )
