"""FSDP 2: parameters are distributed tensors, sharded in place by torch's `fully_shard`.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accelerate.strategies.fsdp import clipping
from accelerate.strategies.fsdp.base import Sharded
from accelerate.strategies.fsdp.parameters import named_parameters
from accelerate.strategies.fsdp.sharding import fsdp2_prepare_model


class FullyShard(Sharded):
    """Sharding by FSDP 2."""

    def wrap(self, model: nn.Module, compile: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return the model, sharded in place, compiled by region before or as a whole afterwards."""
        by_region = self.context.request.dynamo.use_regional_compilation
        inner = compile(model) if by_region else model
        sharded = self.follow(inner, lambda: fsdp2_prepare_model(self.facts, inner), named_parameters)
        return sharded if by_region else compile(sharded)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which units keep whole gradients instead of exchanging them."""
        return _keeping_gradients(units_of(model))

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Scale gradients by their norm over all ranks; return it as a plain tensor."""
        parameters = clipping.listed(parameters)
        norm = clipping.measure(parameters, norm_type, self.context.device)
        clipping.scale_down(parameters, norm, max_norm)
        return norm

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


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Return all units of a sharded model, also under torch.compile's wrapper."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def _keeping_gradients(units: list[FSDPModule]) -> Iterator[None]:
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
