"""Clipping of gradients that are DTensors on several meshes, replicated, or plain tensors.

`torch.nn.utils` clips gradients on one mesh only. The strategies call these functions on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accelerate.base import wrong_value

Parameters = Iterable[Tensor]
Groups = tuple[dist.ProcessGroup, ...]
"""Process groups over which a parameter is sharded, which is empty for a replicated one."""


def local_gradients(parameters: Parameters) -> list[Tensor]:
    """Returns the local shards of all gradients with values, which share memory with the gradients.

    Called on all ranks. Gradients that the backward left replicated or as partial sums are redistributed to
    the placements of their parameters first, in place.
    """
    shards = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        if gradient is not None and not gradient.is_meta:
            shards.append(gradient)
    return shards


def groups_of(parameter: Tensor) -> Groups:
    """Returns the process groups over which a parameter is sharded."""
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
    """Returns the global p-norm of all gradients, as a 0-d tensor of float32, or float64 for float64 weights.

    Called on all ranks with the same parameters in the same order. Gradients may be None. The number of
    collectives is the number of different sets of process groups.

    Args:
        norm_type: p, which may be infinity.
        find_groups: Returns the process groups over which a parameter is sharded.
    """
    if norm_type <= 0:
        raise wrong_value(
            "norm_type", norm_type, "it is not the p of a p-norm", "Use a number above 0, or inf"
        )
    # The parameters determine the collectives, because gradients may be None on some ranks.
    by_groups: dict[tuple[str, ...], tuple[Groups, list[Tensor]]] = {}
    for parameter in parameters:
        groups = find_groups(parameter)
        names = tuple(group.group_name for group in groups)
        by_groups.setdefault(names, (groups, []))[1].append(parameter)
    is_max = norm_type == float("inf")
    powers = [torch.zeros((), device=device)]
    for groups, members in by_groups.values():
        shards = [shard for shard in local_gradients(members) if shard.numel()]
        power = torch.zeros((), device=device, dtype=_norm_dtype(members))
        if shards:
            norm = torch.nn.utils.get_total_norm(shards, norm_type).to(device=device, dtype=power.dtype)
            power = norm if is_max else norm**norm_type
        for group in groups:
            combine_powers(power, is_max, group)
        powers.append(power)
    stacked = torch.stack([power.to(_norm_dtype(parameters)) for power in powers])
    return stacked.max() if is_max else stacked.sum() ** (1.0 / norm_type)


def combine_powers(power: Tensor, is_max: bool, group: dist.ProcessGroup) -> None:
    """Replaces a 0-d tensor by the sum over the ranks of a group, or by the maximum, which may be NaN.

    Args:
        is_max: Whether to compute the maximum.
    """
    if not is_max:
        dist.all_reduce(power, group=group)
        return
    # Backends drop the NaN of some ranks in a maximum.
    both = torch.stack([power.nan_to_num(0.0, float("inf")), power.isnan().to(power.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    power.copy_(both[0].masked_fill(both[1] > 0, float("nan")))


def _norm_dtype(parameters: Parameters) -> torch.dtype:
    """Returns the dtype of the norm of gradients, which is equal on all ranks."""
    is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)
    return torch.float64 if is_double else torch.float32


@torch.no_grad()
def scale_down(parameters: Parameters, norm: Tensor, max_norm: float) -> None:
    """Scales gradients in place so that their global norm, given as `norm`, is at most `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for shard in local_gradients(parameters):
        by_device.setdefault(shard.device, []).append(shard)
    for device, shards in by_device.items():
        torch._foreach_mul_(shards, factor.to(device))


@torch.no_grad()
def clip_values(parameters: Tensor | Parameters, clip_value: float) -> None:
    """Clamps each gradient element to the range from `-clip_value` to `clip_value`, in place."""
    for shard in local_gradients([parameters] if isinstance(parameters, Tensor) else parameters):
        shard.clamp_(-clip_value, clip_value)
