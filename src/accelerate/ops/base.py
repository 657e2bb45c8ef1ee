"""The interface of all transports between processes; its base class is the one for a single process.

A `Transport` handles single tensors and single objects; its callers take nested data apart. It may wrap
another one (a check, a record of calls).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from accelerate.base import wrong_value
from accelerate.ops.header import Header

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]
REDUCTIONS = get_args(Reduction)


class Transport:
    """One process: nothing is sent, every call returns what it was given.

    Attributes:
        size: Number of processes.
        rank: Index of this process among them.
        verifies: Whether comparing shapes before a collective is cheap here (no device to wait for),
            so that it is always done and not only in debug mode.
        header: The header with which collectives of CPU tensors begin; None where those are not supported.
    """

    size: int = 1
    rank: int = 0
    verifies: bool = False
    header: Header | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """Join the tensors of all processes along the first dimension, in rank order, on every process.

        Args:
            tensor: Of the same shape and dtype on all ranks; a 0-d tensor counts as one of shape `[1]`.

        Returns:
            A tensor of shape `[size * n, ...]` on the device of the argument.
        """
        return tensor

    def gather_object(self, obj: Any) -> list[Any]:
        """Collect one picklable object of each process, in rank order, on every process."""
        return [obj]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `source` and return it; shapes are equal on all ranks."""
        return tensor

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Return rank `source`'s object on every process; on the source it is the very object given."""
        return obj

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Combine the tensors of all processes element by element, on every process.

        Args:
            tensor: Of the same shape and dtype on all ranks; it is not changed.
            how: "sum", "mean", "max" or "min". Sums of half-precision numbers are formed in float32. Integers
                and booleans are summed in int64, as `torch.sum` does; their mean has the default floating
                dtype.

        Returns:
            A tensor of the same shape on the device of the argument; on one process the argument itself.
        """
        return tensor

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        """Give each process its part of what rank `source` has.

        Args:
            parts: On the source one tensor for each process, in rank order, all of the shape and dtype of
                `out`; not used on the others.
            out: Filled with the part of this process.
            source: The rank that sends.

        Returns:
            `out`.
        """
        return out.copy_(one_for_each(parts, 1)[0])

    def barrier(self) -> None:
        """Wait until all processes have called this."""


def one_for_each(parts: Sequence[Tensor] | None, size: int) -> Sequence[Tensor]:
    """Return the parts to scatter.

    Raises:
        ConfigurationError: There is not one for each process.
    """
    if parts is None or len(parts) != size:
        given = None if parts is None else len(parts)
        raise wrong_value("parts", given, f"there are {size} processes", "Give one part for each of them")
    return parts


# What both gloo and NCCL support. Other dtypes are sent as bytes when they are only moved.
_SUPPORTED_DTYPES = frozenset(
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


def as_supported(tensor: Tensor) -> Tensor:
    """The same memory under a dtype that every transport supports."""
    return tensor if tensor.dtype in _SUPPORTED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def reducible_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are combined: wide enough for a sum, and supported everywhere."""
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def finished_reduction(total: Tensor, how: str, size: int, given: Tensor) -> Tensor:
    """Divide the combined numbers for a mean, and convert them to the dtype and device of `given`."""
    exact = not (given.dtype.is_floating_point or given.dtype.is_complex)
    if how == "mean":
        total = total / size
    if exact and how in ("sum", "mean"):
        return total.to(given.device)
    return total.to(device=given.device, dtype=given.dtype)
