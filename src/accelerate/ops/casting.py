"""Conversion of half-precision outputs to float32, for a forward that runs in mixed precision.

`accelerate.precision` applies it to the outputs of prepared models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accelerate.nested import recursively_apply

T = TypeVar("T")

_HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


def convert_to_fp32(tensor: T) -> T:
    """Converts half-precision tensors in nested data to float32.

    Args:
        tensor: Nested data, also in fields of dataclasses. Everything that is not a float16 or bfloat16
            tensor is not converted.

    Returns:
        The same nesting. If `tensor` is a single tensor of another dtype, the same object. A dataclass with a
        converted field is copied.
    """
    if isinstance(tensor, Tensor):
        return Tensor.float(tensor) if tensor.dtype in _HALF_DTYPES else tensor  # type: ignore[return-value]
    converted: T = recursively_apply(_convert, tensor, test_type=_has_conversion)
    return converted


def _convert(item: Any) -> Any:
    if isinstance(item, Tensor):
        return Tensor.float(item)
    copied = copy(item)
    for field in fields(item):
        value = getattr(item, field.name, None)
        if _contains_half(value):
            object.__setattr__(copied, field.name, convert_to_fp32(value))  # also of a frozen dataclass
    return copied


def _has_conversion(item: object) -> bool:
    return _is_half(item) or (_is_plain_dataclass(item) and _contains_half(item))


def _contains_half(item: object) -> bool:
    if isinstance(item, (tuple, list)):
        return any(map(_contains_half, item))
    if isinstance(item, Mapping):
        return any(map(_contains_half, item.values()))
    if _is_plain_dataclass(item):
        return any(_contains_half(getattr(item, field.name, None)) for field in fields(item))  # type: ignore[arg-type]
    return _is_half(item)


def _is_plain_dataclass(item: object) -> bool:
    """Returns whether an object is a dataclass, and not a structure that is rebuilt from its items."""
    return hasattr(type(item), "__dataclass_fields__") and not isinstance(item, (Mapping, tuple, list))


class ConvertOutputsToFp32:
    """Callable that runs a forward function and converts its half-precision outputs to float32.

    It can be pickled and copied if the function can.

    Args:
        model_forward: The function to call.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward, updated=())
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def restore(self, module: nn.Module) -> None:
        """Restores the original forward of a module."""
        module.__dict__["forward"] = self.model_forward

    def __getstate__(self) -> dict[str, Any]:
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model_forward"])  # type: ignore[misc]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Wraps a forward function so that its half-precision outputs are converted to float32.

    Args:
        model_forward: The function, which is available as `__wrapped__`.
    """
    return ConvertOutputsToFp32(model_forward)


def _is_half(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALF_DTYPES
