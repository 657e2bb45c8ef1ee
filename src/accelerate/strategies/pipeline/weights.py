"""Whole weights of a model whose layers are on different ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.ops import gather_in_group
from accelerate.strategies.dtensors import whole_tensor
from accelerate.strategies.pipeline.runner import Pipeline


@dataclass(frozen=True)
class RemoteTensor:
    """Weight of one rank of a pipeline, as described on all its ranks."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    source: int  # global rank


def whole_weights(pipeline: Pipeline) -> tuple[dict[str, RemoteTensor], Callable[[RemoteTensor], Tensor]]:
    """Returns the weights of the whole model by name, and a function that returns the values of one.

    Both are called on all ranks of the pipeline, which call the function in the same order.
    """
    group, device = pipeline.group, pipeline.device
    rank = dist.get_rank(group)
    state = pipeline.model.model.state_dict(keep_vars=True)
    own = {pipeline.aliases(name)[0]: value for name, value in state.items()}
    specs = {
        name: (value.shape, value.dtype)
        for name, value in own.items()
        if rank == min(pipeline.holders_of(name))
    }
    found = {
        name: RemoteTensor(name, shape, dtype, dist.get_global_rank(group, index))
        for index, part in enumerate(gather_in_group(specs, group))
        for name, (shape, dtype) in part.items()
    }

    @torch.no_grad()
    def send(weight: RemoteTensor) -> Tensor:
        value = own.get(weight.name)
        whole = None if value is None else whole_tensor(value)
        if whole is None or dist.get_rank() != weight.source:
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        whole = whole.detach().to(device).contiguous()
        dist.broadcast(whole, weight.source, group=group)
        return whole

    return {name: found[pipeline.aliases(name)[0]] for name in pipeline.model.specs}, send
