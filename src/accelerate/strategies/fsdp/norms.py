"""Norms and bounds of gradients that are sharded over several meshes, replicated, or plain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accelerate.base import wrong_value

Parameters = Iterable[Tensor]
Groups = tuple[dist.ProcessGroup, ...]
"""The groups of ranks over which a parameter is sharded; none for a replicated one."""


def local_parts(parameters: Parameters) -> list[Tensor]:
    """Return the local shards of the gradients that exist; writing to them changes the gradients.

    The backward pass leaves some gradients replicated, or as partial sums: these get the placements of their
    parameters first, in place, so all ranks call this.
    """
    parts = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        if gradient is not None:
            parts.append(gradient)
    return parts


def groups_of(parameter: Tensor) -> Groups:
    """Return the groups of ranks over which a distributed tensor is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    sharded = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in sharded)


@torch.no_grad()
def gradient_norm(
    parameters: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    find_groups: Callable[[Tensor], Groups] = groups_of,
) -> Tensor:
    """Return the p-norm of all gradients together, as if each were whole: a 0-d float32 tensor.

    Called on all ranks, with the same parameters in the same order; gradients may be missing. There is one
    collective for each set of groups, however many gradients there are.
    """
    if norm_type <= 0:
        raise wrong_value("norm_type", norm_type, "it is no p of a p-norm", "Give a number above 0, or inf")
    # A rank without gradients must call the same collectives as the others: parameters decide which.
    by_groups: dict[tuple[str, ...], tuple[Groups, list[Tensor]]] = {}
    for parameter in parameters:
        groups = find_groups(parameter)
        names = tuple(group.group_name for group in groups)
        by_groups.setdefault(names, (groups, []))[1].append(parameter)
    is_max = norm_type == float("inf")
    powers = [torch.zeros((), device=device)]
    for groups, members in by_groups.values():
        shards = [shard for shard in local_parts(members) if shard.numel()]
        power = torch.zeros((), device=device)
        if shards:
            norm = torch.nn.utils.get_total_norm(shards, norm_type).to(device=device, dtype=torch.float32)
            power = norm if is_max else norm**norm_type
        for group in groups:
            dist.all_reduce(power, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        powers.append(power)
    stacked = torch.stack(powers)
    return stacked.max() if is_max else stacked.sum() ** (1.0 / norm_type)


@torch.no_grad()
def scale_down(parameters: Parameters, norm: Tensor, max_norm: float) -> None:
    """Scale gradients so that a norm they have together is at most `max_norm`, in place."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in local_parts(parameters):
        by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


@torch.no_grad()
def clip_values(parameters: Tensor | Parameters, clip_value: float) -> None:
    """Cut each gradient element to the range from `-clip_value` to `clip_value`, in place."""
    for part in local_parts([parameters] if isinstance(parameters, Tensor) else parameters):
        part.clamp_(-clip_value, clip_value)
