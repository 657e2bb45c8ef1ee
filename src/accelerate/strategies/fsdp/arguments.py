"""Refusal of units of FSDP 2 that change a list or dict of their caller.

The hooks of FSDP 2 pass copies of lists and dicts with tensors to the forward of a unit, so its changes are
lost without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accelerate.base import PreparationError


def check_arguments(unit: nn.Module) -> None:
    """Lets the first forward of a unit raise an error if it changes a copy of a list or dict."""
    passed: set[int] = set()  # ids of the lists and dicts of the caller
    copies: list[tuple[Any, list[Any]]] = []  # those of the forward, and what they contained before it

    def before_fsdp(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            passed.update(map(id, _containers((args, kwargs))))

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            copies.extend(
                (each, _contents(each)) for each in _containers((args, kwargs)) if id(each) not in passed
            )

    def after_forward(
        module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: object
    ) -> None:
        if torch.compiler.is_compiling():
            return
        for handle in handles:
            handle.remove()
        for container, before in copies:
            now = _contents(container)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                kinds = type(module).__mro__
                name = next(kind.__name__ for kind in kinds if not issubclass(kind, FSDPModule))
                raise PreparationError(
                    f"The forward of {name} changes a {type(container).__name__} that it is called with, and "
                    f"{name} is a unit of FSDP 2, whose forward gets a copy. Return what it adds, or leave "
                    f"{name} out of the units (fsdp_transformer_layer_cls_to_wrap)."
                )
        copies.clear()

    handles = [
        unit.register_forward_pre_hook(before_fsdp, prepend=True, with_kwargs=True),
        unit.register_forward_pre_hook(before_forward, with_kwargs=True),
        unit.register_forward_hook(after_forward, prepend=True, with_kwargs=True),
    ]


def _containers(values: object) -> Iterator[Any]:
    """Yields the lists and dicts in nested values, the outer ones first."""
    if isinstance(values, (list, dict)):
        yield values
    if isinstance(values, (list, tuple, Mapping)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _containers(value)


def _contents(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)
