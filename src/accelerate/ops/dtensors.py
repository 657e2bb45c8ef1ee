"""Distributed tensors in collectives: each is one value, however many ranks hold a part of it.

Source: `torch.distributed.tensor.DTensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelerate.nested import recursively_apply
from accelerate.ops.base import Transport


def is_dtensor(value: object) -> bool:
    """Return whether each rank of a mesh holds a part of a value; torch's class stays unimported."""
    return type(value) is not Tensor and isinstance(value, Tensor) and hasattr(value, "full_tensor")


def whole_tensors(data: Any) -> Any:
    """Return nested data with whole tensors in place of distributed ones; called on all ranks."""
    return recursively_apply(lambda leaf: leaf.full_tensor(), data, test_type=is_dtensor)


def gather_values(data: Any, transport: Transport, gather: Callable[[Any], Any]) -> Any:
    """Join nested tensors of which some are distributed: one whole tensor of each group that shares one.

    Args:
        data: Nested tensors.
        transport: The wire between several processes.
        gather: Joins nested plain tensors of all processes along their first dimension.

    Returns:
        The same nesting of plain tensors, on every process.
    """

    def join(leaf: Tensor) -> Tensor:
        if not is_dtensor(leaf):
            return gather(leaf)  # type: ignore[no-any-return]
        whole, holders = _open(leaf, transport)
        whole = whole if whole.ndim else whole.view(1)
        if holders == [0]:
            return whole
        parts = gather(whole).chunk(transport.size)
        return torch.cat([parts[rank] for rank in holders])

    return recursively_apply(join, data, error_on_other_type=True)


def reduce_values(data: Any, how: str, transport: Transport, reduce: Callable[[Any, str], Any]) -> Any:
    """Combine nested tensors of which some are distributed: each group that shares one counts once.

    Args:
        data: Nested tensors; not changed.
        how: "sum", "mean", "max" or "min".
        transport: The wire between several processes.
        reduce: Combines nested plain tensors of all processes.

    Returns:
        The same nesting of plain tensors, on every process.
    """

    def combine(leaf: Tensor) -> Tensor:
        if not is_dtensor(leaf):
            return reduce(leaf, how)  # type: ignore[no-any-return]
        whole, holders = _open(leaf, transport)
        if holders == [0]:
            return whole
        if how in ("max", "min"):
            return reduce(whole, how)  # type: ignore[no-any-return]
        total: Tensor = reduce(whole if transport.rank in holders else torch.zeros_like(whole), "sum")
        return total if how == "sum" else total / len(holders)

    return recursively_apply(combine, data, error_on_other_type=True)


def _open(leaf: Any, transport: Transport) -> tuple[Tensor, list[int]]:
    """The whole tensor, and the ranks that speak for it: the first of each group that shares one."""
    ranks = leaf.device_mesh.mesh
    whole = leaf.full_tensor()
    if ranks.numel() == transport.size:
        return whole, [0]
    return whole, sorted(set(transport.gather_object(int(ranks.min()))))
