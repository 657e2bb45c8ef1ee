"""In which dtypes numbers travel, and in which they are combined."""

from __future__ import annotations

import torch
from torch import Tensor

# What both gloo and NCCL carry as it is. Other dtypes travel as bytes when they are only moved.
_CARRIED_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)


def as_carried(tensor: Tensor) -> Tensor:
    """The same memory under a dtype that every wire carries."""
    return tensor if tensor.dtype in _CARRIED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def reducible_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are combined: wide enough for a sum, and known to every wire."""
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def finished_reduction(total: Tensor, how: str, size: int, given: Tensor) -> Tensor:
    """Divide the combined numbers for a mean, and bring them back to the dtype and device of `given`."""
    exact = not (given.dtype.is_floating_point or given.dtype.is_complex)
    if how == "mean":
        total = total / size
    if exact and how in ("sum", "mean"):
        return total.to(given.device)
    return total.to(device=given.device, dtype=given.dtype)
