"""Tensors whose lengths differ between processes: padded, or joined by rows without padding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import tee
from typing import Any, TypeVar

import torch
from torch import Tensor

from accelerate.base import ConfigurationError, wrong_value
from accelerate.nested import iterate_tensors, recursively_apply
from accelerate.ops.base import Transport
from accelerate.ops.packed import gather_packed, share_numbers
from accelerate.ops.transport import current_transport
from accelerate.ops.verify import PUBLIC_MODULE, Call, chained_operation, outline

# The size that is sent for a tensor that is not padded.
_LEFT_ALONE = -1

T = TypeVar("T")


class CannotPadNestedTensorWarning(UserWarning):
    """A `torch.nested` tensor was given to be padded; it comes back as it is."""


@chained_operation
def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Bring the tensors of all processes to the same length in one dimension.

    Called on all ranks. All sizes are sent in one collective, whatever the nesting.

    Args:
        tensor: Nested tensors that may differ between ranks in the size of `dim`; a tensor without that
            dimension comes back as it is, so does a `torch.nested` tensor, with one warning for the call.
        dim: The dimension to pad; negative ones count from the end.
        pad_index: The value to fill with.
        pad_first: Fill at the beginning instead of the end.

    Returns:
        The same nesting; each tensor as long in `dim` as the longest of all processes, unchanged where it is.

    Raises:
        DistributedOperationException: The numbers of dimensions differ (on CPU always; else in debug mode).
    """
    if any(leaf.is_nested for leaf in iterate_tensors(tensor)):
        warnings.warn(
            "A nested tensor has no common length and cannot be padded: it comes back as it is.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
    transport = current_transport()
    if transport.size == 1:
        return tensor
    sizes: list[int] = []
    recursively_apply(lambda leaf: sizes.append(_size_to_pad(leaf, dim)), tensor, error_on_other_type=True)
    call = Call(f"{PUBLIC_MODULE}.pad_across_processes", f"dim={dim}", tensor)
    table = share_numbers(sizes, transport, call, outline(tensor, Tensor.dim))
    longest = iter([max(column) for column in zip(*table, strict=True)])
    padded: T = recursively_apply(
        lambda leaf: _pad(leaf, dim, next(longest), pad_index, pad_first), tensor, error_on_other_type=True
    )
    return padded


def pad_input_tensors(tensor: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Repeat the last sample until the batch divides among the processes. Purely local.

    Args:
        tensor: Nested tensors; only those of size `batch_size` in `dim` are padded.
        batch_size: Number of samples in the batch.
        num_processes: Number of equal parts it will be cut in.
        dim: The dimension that counts samples.

    Returns:
        The same nesting, `batch_size` rounded up to a multiple of `num_processes`.
    """
    missing = -batch_size % num_processes
    if missing == 0 or batch_size == 0:
        return tensor
    padded: T = recursively_apply(_repeat_last, tensor, batch_size, missing, dim)
    return padded


def _can_pad(tensor: Tensor, dim: int) -> bool:
    return not tensor.is_nested and -tensor.ndim <= dim < tensor.ndim


def _size_to_pad(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if _can_pad(tensor, dim) else _LEFT_ALONE


def _pad(tensor: Tensor, dim: int, longest: int, pad_index: int, pad_first: bool) -> Tensor:
    if not _can_pad(tensor, dim) or tensor.shape[dim] == longest:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = longest - tensor.shape[dim]
    filling = tensor.new_full(shape, pad_index)
    return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=dim)


def _repeat_last(tensor: Tensor, batch_size: int, missing: int, dim: int) -> Tensor:
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] != batch_size:
        return tensor
    last = tensor.narrow(dim, batch_size - 1, 1)
    return torch.cat([tensor, *[last] * missing], dim=dim)


# Rows


def gather_rows(data: Any, counts: Iterator[tuple[int, ...]], transport: Transport, call: Call) -> Any:
    """Join tensors along their first dimension: padded to the longest to be sent, and cut again.

    Args:
        data: Nested tensors that agree on all ranks in everything but the number of rows.
        counts: For each tensor the number of its rows on each rank; the same on all ranks.
        transport: Between several processes.
        call: For the message when the processes disagree.
    """
    first, second = tee(counts)
    filled = recursively_apply(lambda leaf: _pad_rows(leaf, next(first)), data, error_on_other_type=True)
    joined = gather_packed(filled, transport, call)
    return recursively_apply(lambda leaf: _cut(leaf, next(second)), joined)


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows of a tensor; refuse one that has fewer."""
    rows = 0 if tensor.ndim == 0 else tensor.shape[0]
    if rows < count or tensor.ndim == 0:
        raise too_few_rows(rows, count)
    return tensor if rows == count else tensor[:count]


def at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def row_fact(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape[1:]), str(tensor.dtype)


def too_few_rows(rows: int, count: int) -> ConfigurationError:
    reason = f"this process has {rows} samples and not {count}"
    fix = "Give one row for each sample of the batch; average only after gathering"
    return wrong_value("counts", count, reason, fix)


def _pad_rows(tensor: Tensor, counts: tuple[int, ...]) -> Tensor:
    missing = max(counts) - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor


def _cut(joined: Tensor, counts: tuple[int, ...]) -> Tensor:
    longest = max(counts)
    if min(counts) == longest:
        return joined
    return torch.cat([joined[rank * longest : rank * longest + count] for rank, count in enumerate(counts)])
