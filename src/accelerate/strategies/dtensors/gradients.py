"""Gradients of parameters of which several ranks have the same elements, averaged or added in buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate.ops import local_tensor
from accelerate.strategies.dtensors.norms import local_gradients


@dataclass
class Replicas:
    """Parameters of which the ranks of a process group have the same elements.

    Attributes:
        parameters: The parameters, in the same order on all ranks.
        sparse: Those of which gradients are sparse.
        group: Process group of the ranks with the same elements of these parameters.
        has_batches: Whether these ranks have different batches or parts of sequences. Otherwise their
            gradients are equal.
        averages: Whether gradients are averaged. Otherwise they are added, such as those of stages.
        bucket_bytes: Bytes of gradients that are sent in one call.
    """

    parameters: list[nn.Parameter]
    sparse: set[nn.Parameter]
    group: Any
    has_batches: bool
    averages: bool = True
    bucket_bytes: float = float("inf")

    @torch.no_grad()
    def average(self) -> None:
        """Averages or adds the gradients over the group, where a rank without a gradient counts as zeros.

        Called on all ranks of the group.
        """
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        dense = [parameter for parameter in trained if parameter not in self.sparse]
        for parameter in trained:
            if parameter in self.sparse:
                self._average_sparse(parameter)
        divisor = dist.get_world_size(self.group) if self.averages else 1
        sum_gradients(dense, self._all_reduce, divisor, self.bucket_bytes)

    def _all_reduce(self, flat: Tensor) -> bool:
        dist.all_reduce(flat, group=self.group)
        return True

    def _average_sparse(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            values = parameter.new_empty(0, *parameter.shape[1:])
            indices = torch.empty(1, 0, dtype=torch.long, device=parameter.device)
            gradient = torch.sparse_coo_tensor(indices, values, parameter.shape)
        mean = (gradient / dist.get_world_size(self.group)).coalesce()
        dist.all_reduce(mean, group=self.group)
        if parameter.grad is not None or mean.values().numel():
            parameter.grad = mean


@torch.no_grad()
def sum_gradients(
    parameters: Sequence[nn.Parameter],
    all_reduce: Callable[[Tensor], bool],
    divisor: int = 1,
    bucket_bytes: float = float("inf"),
) -> None:
    """Adds up gradients over ranks, where a rank without a gradient counts as zeros.

    Called on all these ranks. A gradient that no rank has stays None, so that optimizers skip its parameter.

    Args:
        parameters: Parameters in the same order on all ranks, whose gradients are dense.
        all_reduce: Adds up a tensor over the ranks in place, and returns whether it succeeded. The gradients
            have no meaning otherwise.
        divisor: Divisor of the sums.
        bucket_bytes: Bytes from which gradients are sent in another call.
    """
    local_gradients(parameters)
    buckets: dict[tuple[torch.device, torch.dtype], list[list[nn.Parameter]]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], float] = {}
    for parameter in parameters:
        local = local_tensor(parameter)
        kind = local.device, local.dtype
        if sizes.get(kind, bucket_bytes) >= bucket_bytes:
            buckets.setdefault(kind, []).append([])
            sizes[kind] = 0
        buckets[kind][-1].append(parameter)
        sizes[kind] += local.nbytes
    for bucket in (bucket for several in buckets.values() for bucket in several):
        if not _sum_bucket(bucket, all_reduce, divisor):
            return


def _sum_bucket(
    parameters: Sequence[nn.Parameter], all_reduce: Callable[[Tensor], bool], divisor: int
) -> bool:
    shards = [local_tensor(p) if p.grad is None else local_tensor(p.grad) for p in parameters]
    exists = shards[0].new_tensor([p.grad is not None for p in parameters])
    parts = [
        (torch.zeros_like(shard) if p.grad is None else shard / divisor).reshape(-1)
        for p, shard in zip(parameters, shards, strict=True)
    ]
    flat = torch.cat([exists, *parts])
    if not all_reduce(flat):
        return False
    found, *sums = torch.split(flat, [len(parts), *(part.numel() for part in parts)])
    for parameter, shard, total, is_any in zip(parameters, shards, sums, found.tolist(), strict=True):
        if not is_any:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_tensor(parameter.grad).copy_(total.view_as(shard))
    return True


def sparse_weights(model: nn.Module) -> set[nn.Parameter]:
    """Returns the weights of embeddings with sparse gradients."""
    sparse = (module for module in model.modules() if getattr(module, "sparse", False))
    return {parameter for module in sparse for parameter in module.parameters(recurse=False)}
