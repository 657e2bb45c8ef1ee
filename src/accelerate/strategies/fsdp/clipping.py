"""Norms and bounds of gradients that are sharded over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accelerate.base import wrong_value
from accelerate.strategies.bundle import as_list

Groups = tuple[dist.ProcessGroup, ...]
"""The groups of ranks over which a parameter is spread; none for one that is whole on each rank."""


def align_placements(parameters: Iterable[torch.Tensor]) -> None:
    """Let gradients be spread as their parameters are, in place; called on all ranks.

    The backward pass leaves some whole on each rank, or as one summand on each.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if (
            isinstance(parameter, DTensor)
            and isinstance(gradient, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def local_parts(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local shards of the gradients that exist; writing to them changes the gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]


def groups_of(parameter: torch.Tensor) -> Groups:
    """Return the groups of ranks over which a distributed tensor is spread."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    spread = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in spread)


@torch.no_grad()
def measure(
    parameters: Sequence[torch.Tensor],
    norm_type: float,
    device: torch.device,
    spread: Callable[[torch.Tensor], Groups] = groups_of,
) -> torch.Tensor:
    """Return the norm of all gradients together, as if each were whole; called on all ranks.

    One collective for each kind of spreading, however many gradients there are.

    Args:
        parameters: the same on all ranks, in the same order; gradients may be missing.
        norm_type: the p of the p-norm, above 0.

    Returns:
        A 0-d float32 tensor, the same on all ranks.
    """
    if norm_type <= 0:
        raise wrong_value("norm_type", norm_type, "it is no p of a p-norm", "Give a number above 0, or inf")
    align_placements(parameters)
    # A rank without gradients must come to the same collectives as the others: parameters make the kinds.
    kinds: dict[tuple[str, ...], tuple[Groups, list[torch.Tensor]]] = {}
    for parameter in parameters:
        groups = spread(parameter)
        kind = tuple(group.group_name for group in groups)
        kinds.setdefault(kind, (groups, []))[1].append(parameter)
    powers = [
        _over_groups(_power(local_parts(members), norm_type, device), norm_type, groups)
        for groups, members in kinds.values()
    ]
    if not powers:
        return torch.zeros((), device=device)
    stacked = torch.stack(powers)
    return stacked.max() if norm_type == float("inf") else stacked.sum() ** (1.0 / norm_type)


def _power(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=device)
    norm = torch.nn.utils.get_total_norm(filled, norm_type).to(device=device, dtype=torch.float32)
    return norm if norm_type == float("inf") else norm**norm_type


def _over_groups(power: torch.Tensor, norm_type: float, groups: Groups) -> torch.Tensor:
    operation = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
    for group in groups:
        dist.all_reduce(power, op=operation, group=group)
    return power


@torch.no_grad()
def scale_down(parameters: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients so that a norm they have together is at most `max_norm`, in place."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in local_parts(parameters):
        by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


@torch.no_grad()
def clip_values(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Cut each gradient element to the range from `-clip_value` to `clip_value`, in place."""
    parameters = as_list(parameters)
    align_placements(parameters)
    for part in local_parts(parameters):
        part.clamp_(-clip_value, clip_value)
