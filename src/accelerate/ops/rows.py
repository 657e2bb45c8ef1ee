"""Tensors with one row for each sample, of which the processes have different numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import tee
from typing import Any

import torch
from torch import Tensor

from accelerate.base import ConfigurationError, wrong_value
from accelerate.nested import recursively_apply
from accelerate.ops.base import Transport
from accelerate.ops.packed import gather_packed
from accelerate.ops.verify import Call


def gather_rows(data: Any, counts: Iterator[tuple[int, ...]], transport: Transport, call: Call) -> Any:
    """Join tensors along their first dimension: filled up to the longest for the way, and cut again.

    Args:
        data: Nested tensors that agree on all ranks in everything but the number of rows.
        counts: For each tensor the number of its rows on each rank; the same on all ranks.
        transport: The wire between several processes.
        call: For the message when the processes disagree.

    Returns:
        The same nesting; the rows of all ranks in rank order.
    """
    first, second = tee(counts)
    filled = recursively_apply(lambda leaf: _fill_up(leaf, next(first)), data, error_on_other_type=True)
    joined = gather_packed(filled, transport, call)
    return recursively_apply(lambda leaf: _cut(leaf, next(second)), joined)


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows of a tensor.

    Raises:
        ConfigurationError: It has fewer.
    """
    rows = 0 if tensor.ndim == 0 else tensor.shape[0]
    if rows < count or tensor.ndim == 0:
        raise too_few_rows(rows, count)
    return tensor if rows == count else tensor[:count]


def at_least_1d(tensor: Tensor) -> Tensor:
    """Return a 0-d tensor as one row, any other as it is."""
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def row_fact(tensor: Tensor) -> tuple[list[int], str]:
    """Describe the rows of a tensor, whatever their number."""
    return list(tensor.shape[1:]), str(tensor.dtype)


def too_few_rows(rows: int, count: int) -> ConfigurationError:
    """Build the error for data with fewer samples than were announced."""
    return wrong_value(
        "counts",
        count,
        f"this process has {rows} samples and not {count}",
        "Give one row for each sample of the batch; average only after gathering",
    )


def _fill_up(tensor: Tensor, counts: tuple[int, ...]) -> Tensor:
    missing = max(counts) - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor


def _cut(joined: Tensor, counts: tuple[int, ...]) -> Tensor:
    longest = max(counts)
    if min(counts) == longest:
        return joined
    return torch.cat([joined[rank * longest : rank * longest + count] for rank, count in enumerate(counts)])
