"""Float32 outputs from a forward that runs in a lower precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accelerate.nested import recursively_apply

T = TypeVar("T")

_HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


def convert_to_fp32(tensor: T) -> T:
    """Turn half-precision tensors into float32.

    Args:
        tensor: Nested data; everything that is not a float16 or bfloat16 tensor stays what it is.

    Returns:
        The same nesting; a bare tensor that is no half is the very one given.
    """
    if isinstance(tensor, Tensor) and tensor.dtype not in _HALF_DTYPES:
        return tensor
    converted: T = recursively_apply(Tensor.float, tensor, test_type=_is_half)
    return converted


class ConvertOutputsToFp32:
    """A forward function whose outputs are float32. It pickles and copies like the function it holds.

    Args:
        model_forward: The function to call.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward, updated=())
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def restore(self, module: nn.Module) -> None:
        """Give a module back the forward that it had before this one."""
        module.__dict__["forward"] = self.model_forward

    def __getstate__(self) -> dict[str, Any]:
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model_forward"])  # type: ignore[misc]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Wrap a forward function so that its half-precision outputs come as float32.

    Args:
        model_forward: The function; it stays reachable as `__wrapped__`.
    """
    return ConvertOutputsToFp32(model_forward)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALF_DTYPES
