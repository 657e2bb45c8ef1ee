"""Comparison of values of recomputed blocks with those of their forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import wrong_value
from accelerate.nested import iterate_tensors
from accelerate.strategies.tolerances import as_real

NUM_SAMPLED = 64
"""Number of elements of a tensor that are compared."""
_MIN_COMPARED = 8
"""Number of elements from which a tensor is compared, as a sum that cancels may round differently."""
_TOLERANCE, _TOLERANCE_IN_16_BITS = 1e-3, 2e-2
"""Largest mean of differences relative to that of the elements.

Kernels that add in any order round differently, and may choose other experts for a few tokens.
"""


def check_of(name: str) -> str | None:
    """Returns the `determinism_check` of `torch.utils.checkpoint` that compares values, if torch takes one.

    A block may use values that have changed since its forward and that its recomputation does not restore,
    such as variables of a closure, or of a hook of a module in it.
    """
    checks: dict[str, Any] | None = torch_private.determinism_checks
    if checks is None:
        return None
    key = f"values of {name}"
    checks.setdefault(key, partial(SavedTensor, name))
    return key


class SavedTensor:
    """Shape, dtype, device and some elements of a tensor that a block keeps for the backward pass.

    Args:
        tensor: The tensor, or in the backward pass the recomputed one.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name, self._metadata = name, (tensor.shape, tensor.dtype, tensor.device)
        # Tensors without gradients may change in place, or have padding without values.
        self._has_gradient = tensor.requires_grad
        self._elements = _elements_of(tensor)

    def __repr__(self) -> str:
        return str(self._metadata)

    def __eq__(self, other: object) -> bool:
        """Returns whether the recomputed tensor has the same shape, dtype and device.

        Raises:
            ConfigurationError: It has other values.
        """
        if not isinstance(other, SavedTensor):
            return NotImplemented
        is_equal = self._metadata == other._metadata
        if is_equal and self._has_gradient and self._elements and other._elements:
            pairs = zip(self._elements, other._elements, strict=True)
            finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
            dtype = self._metadata[1]
            tolerance = _TOLERANCE if dtype.itemsize >= 4 else _TOLERANCE_IN_16_BITS
            size = sum(abs(a) for a, _ in finite)
            if sum(abs(a - b) for a, b in finite) > tolerance * size + 1e-12:
                self.refuse()
        return is_equal

    def refuse(self) -> None:
        """Raises the error for other values."""
        reason = (
            "its recomputation has other values than its forward, because it uses one that has changed since "
            "and that is not restored"
        )
        fix = (
            "Keep the value in an attribute of the block, as a number, list, dict, generator of torch or "
            f"buffer, change it outside of {self._name}, or leave {self._name} out of the blocks that are "
            "recomputed"
        )
        raise wrong_value("activation checkpointing", self._name, reason, fix)

    __hash__ = None  # type: ignore[assignment]


def compared(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the forward of a block that raises an error if its recomputation returns other outputs.

    The tensors that a block keeps may end before the operator that uses a value which has changed.
    """
    expected: list[SavedTensor] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal expected
        outputs = forward(*args, **kwargs)
        found = [SavedTensor(name, each) for each in iterate_tensors(outputs) if each.requires_grad]
        if expected is None:
            expected = found
        elif expected != found:
            expected[0].refuse()
        return outputs

    return run


def _elements_of(tensor: Tensor) -> list[float] | None:
    """Returns elements of a tensor with floating-point values on this rank, or None."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if tensor.numel() < _MIN_COMPARED or not tensor.untyped_storage().nbytes() or is_captured:
        return None
    # Modes such as those of `save_operators` count operators.
    with torch.no_grad(), torch_private.no_dispatch():
        values = as_real(tensor.detach())
        if not values.is_floating_point():
            return None
        count = min(values.numel(), NUM_SAMPLED)
        positions = torch.arange(count, device=values.device) * (values.numel() // count)
        elements: list[float] = values[torch.unravel_index(positions, values.shape)].float().tolist()
    return elements
