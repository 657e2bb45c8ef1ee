"""Comparison of the gradients of parameters that the ranks of tensor parallelism have as a whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelerate.base import StateError, listed
from accelerate.ops import local_tensor
from accelerate.strategies.tolerances import Tolerance, must_compare

TOLERANCE = Tolerance(0.05, 1e-4)
"""Difference of norms that the rounding of ranks which compute the same values does not exceed."""


class WholeGradients:
    """Gradients of parameters of which each rank with the same batch has all elements.

    Such a gradient is that of one rank if a layer uses the parameter for the part of the rank, such as a
    scale of its attention heads. Ranks that draw different random numbers also compute different ones.
    Comparisons whose number is a power of two are made.

    Args:
        group: Process group of the ranks.
        device: Device of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._ranks = set(dist.get_process_group_ranks(group))
        self._number = 0

    @torch.no_grad()
    def compare(self, models: Iterable[nn.Module]) -> None:
        """Raises an error on all ranks of the group if the norms of gradients differ."""
        self._number += 1
        if not must_compare(self._number):
            return
        whole = {
            name: self._norm(parameter)
            for model in models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and self._is_whole(parameter)
        }
        if not whole:
            return
        own = torch.stack(list(whole.values()))
        everyone = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(everyone, own, group=self._group)
        table = torch.stack(everyone)
        table[:, ~table.isfinite().all(0)] = 0.0
        highest = table.amax(0)
        limits = TOLERANCE.relative * highest + TOLERANCE.absolute * highest.max()
        differs = (highest - table.amin(0) > limits).tolist()
        if wrong := [name for name, is_wrong in zip(whole, differs, strict=True) if is_wrong]:
            raise StateError(
                f"Ranks of tensor parallelism have different gradients of {listed(wrong)}, which each rank "
                "has as a whole. Either a layer uses them for the part of one rank, such as a scale or a "
                "norm of attention heads: leave the layers around them out of the tp_plan, or give a norm of "
                "heads the style 'replicated_with_grad_allreduce'. Or ranks draw different random numbers, "
                "such as for dropout: set the same seed on all ranks with the same batch."
            )

    def _is_whole(self, parameter: Tensor) -> bool:
        """Returns whether the other ranks of the group have the same elements of a parameter."""
        if not isinstance(parameter, DTensor):
            return not parameter.is_meta
        return len(self._ranks.intersection(parameter.device_mesh.mesh.flatten().tolist())) == 1

    def _norm(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return torch.zeros((), device=self._device)
        norm: Tensor = torch.linalg.vector_norm(local_tensor(gradient))
        return norm.float().to(self._device)
