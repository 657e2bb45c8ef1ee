"""FSDP 2: parameters are distributed tensors, sharded in place by torch's `fully_shard`.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accelerate.strategies.fsdp import clipping
from accelerate.strategies.fsdp.base import Sharded
from accelerate.strategies.fsdp.parameters import named_parameters
from accelerate.strategies.fsdp.sharding import fsdp2_prepare_model
from accelerate.strategies.fsdp.states import WholeOptimizer, gather_state, own_part
from accelerate.strategies.request import Context


class FullyShard(Sharded):
    """Sharding by FSDP 2."""

    gathers_shards = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.shard: Callable[[nn.Module], nn.Module] = partial(fsdp2_prepare_model, self.facts)

    def split(self, model: nn.Module) -> nn.Module:
        """Return the very model, with distributed tensors as parameters."""
        return self.follow(model, lambda: self.shard(model), named_parameters)

    @contextmanager
    def unsharded(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Fetch all units and keep them; afterwards they are freed and fetched as before."""
        frees = self.plugin.reshard_after_forward
        # The outermost unit, which comes first, is never freed after forward.
        units = [(unit, frees and inside) for model in models for inside, unit in enumerate(units_of(model))]
        for unit, _ in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit, is_freed in units:
                unit.set_reshard_after_forward(bool(is_freed), recurse=False)
                unit.reshard()

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
