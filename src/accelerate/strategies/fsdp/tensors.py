"""Ways of training in which parameters are distributed tensors: norms, whole states and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.strategies.fsdp import clipping
from accelerate.strategies.fsdp.base import Sharded
from accelerate.strategies.fsdp.states import WholeOptimizer, gather_state, own_part


class DistributedTensors(Sharded):
    """What does not depend on the axes over which tensors are distributed."""

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients by their norm over all ranks; return it as a plain tensor."""
        parameters = clipping.listed(parameters)
        norm = clipping.measure(parameters, norm_type, self.context.device)
        clipping.scale_down(parameters, norm, max_norm)
        return norm

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        """Return what saves and loads the optimizers with whole tensors."""
        keep = self.context.topology.local_rank == 0
        return [WholeOptimizer(each, gather_state(each, keep) if gather else None) for each in optimizers]

    def load_weights(
        self, model: nn.Module, state: Mapping[str, Any], fill: Callable[[nn.Module, Mapping[str, Any]], None]
    ) -> None:
        """Load this rank's part of whole weights."""
        inner = self.unwrap(model, keep_compiled=False)
        targets = inner.state_dict(keep_vars=True)
        fill(inner, {name: own_part(value, targets.get(name, value)) for name, value in state.items()})

    @torch.no_grad()
    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Return the whole state, gathered tensor by tensor, on the CPU of each machine's first process."""
        source = self.unwrap(model, keep_compiled=False) if unwrap else model
        keeps = self.context.topology.local_rank == 0
        state: dict[str, Any] = {}
        known: dict[int, torch.Tensor] = {}  # tied tensors stay one
        for name, value in source.state_dict(keep_vars=True).items():
            if id(value) not in known:
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                known[id(value)] = whole.detach().cpu() if keeps else whole.new_empty(0)
            state[name] = known[id(value)]
        return self.keep_whole(state)
