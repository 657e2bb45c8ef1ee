"""Whole weights under FSDP 1, one at a time, from the elements of flat parameters on each rank.

torch gathers all units for a full state dict. Here each rank broadcasts its elements of one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from accelerate import torch_private
from accelerate.ops import gather_in_group
from accelerate.strategies.dtensors import clean_name
from accelerate.strategies.fsdp.flat_states import LocalRange, local_ranges, outside_units
from accelerate.weights import is_extra


class FlatWeight(NamedTuple):
    """Parameter in the flat parameter of a unit.

    Attributes:
        values: Elements on this rank.
        lengths: Number of elements on each rank of `group`, which follow each other.
        group: Process group of the ranks that have all elements together, or None if this rank has them.
    """

    shape: torch.Size
    dtype: torch.dtype
    values: Tensor
    lengths: list[int]
    group: Any


def whole_weights(
    root: FSDP, device: torch.device
) -> tuple[dict[str, Any], Callable[[FlatWeight | Tensor], Tensor]]:
    """Returns the weights of a model in the order of its modules, and a function that gathers one of them.

    Called on all ranks.
    """
    ranges = list(local_ranges(root))
    weights: dict[str, Any] = {}
    for local, lengths in zip(ranges, _lengths_by_rank(ranges), strict=True):
        flat = FlatWeight(torch.Size(local.shape), local.values.dtype, local.values, lengths, local.group)
        weights.update(dict.fromkeys(local.names, flat))
    dtypes = torch_private.original_buffer_dtypes(root)
    for name, value in outside_units(root, set(weights)):
        is_cast = isinstance(value, Tensor) and name in dtypes and value.dtype != dtypes[name]
        weights[name] = value.to(dtypes[name]) if is_cast else value

    def gather(weight: FlatWeight | Tensor) -> Tensor:
        return _gather(weight, device) if isinstance(weight, FlatWeight) else weight.detach()

    return {name: weights[name] for name in _in_order(root, weights)}, gather


def _lengths_by_rank(ranges: list[LocalRange]) -> list[list[int]]:
    """Returns the number of elements of each range on each rank of its group, in the order of the ranges."""
    own = [local.values.numel() for local in ranges]
    groups = dict.fromkeys(local.group for local in ranges if local.group is not None)
    gathered = {group: gather_in_group(own, group) for group in groups}
    return [
        [own[index]] if local.group is None else [lengths[index] for lengths in gathered[local.group]]
        for index, local in enumerate(ranges)
    ]


@torch.no_grad()
def _gather(weight: FlatWeight, device: torch.device) -> Tensor:
    """Returns the whole tensor of a weight on all ranks of its group."""
    if weight.group is None:
        return weight.values.view(weight.shape)
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    own = dist.get_rank(weight.group)
    works = []
    for rank, part in enumerate(torch.split(whole.view(-1), weight.lengths)):
        if rank == own:
            part.copy_(weight.values)
        if part.numel():
            source = dist.get_global_rank(weight.group, rank)
            works.append(dist.broadcast(part, source, group=weight.group, async_op=True))
    for work in works:
        work.wait()
    return whole


def _in_order(root: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns names in the order of the modules of a model, as in a state dict of one process."""
    positions = {clean_name(path): index for index, (path, _) in enumerate(root.named_modules())}
    by_kind = {clean_name(name): 1 for name, _ in root.named_buffers(remove_duplicate=False)}

    def position(name: str) -> tuple[int, int]:
        return positions[name.rpartition(".")[0]], 2 if is_extra(name) else by_kind.get(name, 0)

    return sorted(names, key=position)
