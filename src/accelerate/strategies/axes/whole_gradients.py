"""Comparison of losses, and of gradients of whole parameters, between ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelerate.base import StateError, listed
from accelerate.ops import local_tensor
from accelerate.state import run_observers
from accelerate.strategies.tolerances import Tolerance, must_compare

TOLERANCE = Tolerance(0.05, 1e-4)
"""Difference of norms that the rounding of ranks which compute the same values does not exceed."""
_LOSS_TOLERANCE = 1e-4
"""The same for losses, relative to the loss. Losses of a low precision differ by its rounding, too."""


class WholeGradients:
    """Observer of a run that compares ranks with the same batch, which shard the layers of a model.

    The gradient of a parameter of which each rank has all elements is that of one rank if a layer uses the
    parameter for the part of the rank, such as a scale of its attention heads. The loss of a rank is that of
    a part of the outputs if the last layer is sharded. Ranks that draw different random numbers also compute
    different gradients and losses. Comparisons whose number is a power of two are made.

    Args:
        group: Process group of the ranks.
        device: Device of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._ranks = set(dist.get_process_group_ranks(group))
        self._number = 0
        self._loss: Tensor | None = None  # of the last backward pass before a comparison
        run_observers().add(self)

    def before_backward(self, loss: Tensor, arguments: object) -> None:
        """Keeps the loss for the comparison."""
        if must_compare(self._number + 1):  # that of `loss_parallel` is a DTensor, equal on all ranks
            self._loss = None if isinstance(loss, DTensor) else loss.detach()

    @torch.no_grad()
    def compare(self, models: Iterable[nn.Module]) -> None:
        """Raises an error on all ranks of the group if the losses or the norms of gradients differ."""
        self._number += 1
        loss, self._loss = self._loss, None
        if not must_compare(self._number):
            return
        whole = {
            name: self._norm(parameter)
            for model in models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and self._is_whole(parameter)
        }
        if not whole and loss is None:
            return
        own = torch.stack([*whole.values(), self._sum(loss)])
        everyone = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(everyone, own, group=self._group)
        table = torch.stack(everyone)
        table[:, ~table.isfinite().all(0)] = 0.0
        _refuse_gradients(list(whole), table[:, :-1])
        if loss is not None and loss.is_floating_point():
            _refuse_losses(table[:, -1], max(_LOSS_TOLERANCE, 2 * torch.finfo(loss.dtype).eps))

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

    def _sum(self, loss: Tensor | None) -> Tensor:
        return torch.zeros((), device=self._device) if loss is None else loss.sum().float().to(self._device)

    def end(self) -> None:
        """Ends the comparisons."""
        run_observers().remove(self)


def compare_groups(groups: Sequence[Sequence[int]], device: torch.device) -> WholeGradients | None:
    """Returns the comparison of the ranks of each group, or None for groups of one rank.

    Called on all ranks.
    """
    if max(map(len, groups), default=1) == 1:
        return None
    enumerate_groups: Any = dist.new_subgroups_by_enumeration
    group, _ = enumerate_groups(list(map(list, groups)))
    return WholeGradients(group, device)


def _refuse_gradients(names: Sequence[str], table: Tensor) -> None:
    if not names:
        return
    highest = table.amax(0)
    limits = TOLERANCE.relative * highest + TOLERANCE.absolute * highest.max()
    differs = (highest - table.amin(0) > limits).tolist()
    if wrong := [name for name, is_wrong in zip(names, differs, strict=True) if is_wrong]:
        raise StateError(
            f"Ranks of tensor parallelism have different gradients of {listed(wrong)}, which each rank "
            "has as a whole. Either a layer uses them for the part of one rank, such as a scale or a "
            "norm of attention heads: leave the layers around them out of the plan, or give a norm of "
            "heads the style 'replicated_with_grad_allreduce'. Or ranks draw different random numbers, "
            "such as for dropout: set the same seed on all ranks with the same batch."
        )


def _refuse_losses(losses: Tensor, tolerance: float) -> None:
    if losses.max() - losses.min() <= tolerance * losses.abs().max():
        return
    texts = ", ".join(f"{loss:.6g}" for loss in losses.tolist())
    raise StateError(
        f"Ranks of tensor parallelism compute different losses of the same batch ({texts}). Either a last "
        "layer with the style 'colwise' gives each rank a part of the outputs: use "
        "'colwise_gather_output', or ColwiseParallel(output_layouts=Replicate()), or compute the loss of all "
        "parts with accelerator.lm_loss or torch's loss_parallel. Or ranks read different batches or draw "
        "different random numbers: prepare the loader, and set the same seed on all ranks with one batch."
    )
