"""Parameters that are distributed tensors: sharded by FSDP 2 in place, by tensor parallelism, or by both.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from accelerate.strategies.axes import share_layers
from accelerate.strategies.base import Fill
from accelerate.strategies.ddp import exchanging
from accelerate.strategies.fsdp.base import GatheredOptimizer, Sharded
from accelerate.strategies.fsdp.parameters import distribute_like, named_parameters
from accelerate.strategies.fsdp.sharding import split_by_dtype
from accelerate.strategies.session import Bundle, Kind


class DistributedTensors(Sharded):
    """What does not depend on the dimensions of the mesh over which tensors are distributed."""

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        return [
            WholeOptimizer(optimizer, gather_state(optimizer, self.keeps_whole_states) if gather else None)
            for optimizer in optimizers
        ]

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        inner = self.unwrap(model, keep_compiled=False)
        targets = inner.state_dict(keep_vars=True)
        fill(inner, {name: distribute_like(value, targets.get(name, value)) for name, value in state.items()})

    @torch.no_grad()
    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Return the whole state, gathered tensor by tensor, on the CPU of each machine's first process."""
        source = self.unwrap(model, keep_compiled=False) if unwrap else model
        state: dict[str, Any] = {}
        gathered: dict[int, Tensor] = {}  # tied tensors stay one
        for name, value in source.state_dict(keep_vars=True).items():
            if id(value) not in gathered:
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                gathered[id(value)] = whole.detach().cpu() if self.keeps_whole_states else whole.new_empty(0)
            state[name] = gathered[id(value)]
        return state if self.keeps_whole_states else {}


class FullyShard(DistributedTensors):
    """Sharding by FSDP 2."""

    gathers_shards = True

    def split(self, model: nn.Module) -> nn.Module:
        """Return the very model, with distributed tensors as parameters."""
        session = self.session
        shard = partial(session.functions().fsdp2_prepare_model, session.preparer, model)
        return self.follow(model, shard, named_parameters)

    def check(self, bundle: Bundle) -> None:
        """Let optimizers that were built on gathered parameters step the shards; then check as all do."""
        if bundle.new(Kind.OPTIMIZER):
            for model in self.session.prepared.models:
                self._free(model)
        super().check(bundle)

    def _free(self, model: nn.Module) -> None:
        """Free units that a forward has left gathered, and note which parameters stood for which."""
        gathered = named_parameters(model)
        for unit in units_of(model):
            unit.reshard()
        self.session.replace((gathered[name], shard) for name, shard in named_parameters(model).items())

    @contextmanager
    def unsharded(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Gather all units and keep them; afterwards they are freed and gathered as before."""
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
        return exchanging(model, on=False)


class TensorParallel(DistributedTensors):
    """Tensor parallelism without FSDP: all processes share each layer, and each batch."""

    distributed_type = None  # the label is that of the hardware

    def split(self, model: nn.Module) -> nn.Module:
        model = model.to(self.context.device)
        return self.follow(model, lambda: self._share(model), named_parameters)

    def _share(self, model: nn.Module) -> nn.Module:
        share_layers(model, self.context.mesh)
        return model


class CopiedTensorParallel(TensorParallel):
    """Groups of processes share each layer; the backward pass averages gradients over the groups."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return exchanging(model, on=False)

    def _share(self, model: nn.Module) -> nn.Module:
        """Let FSDP 2 average: to shard over one process is to hold a copy."""
        mesh, shared = self.context.mesh, self.context.mesh["tp"].size()
        shape = (mesh.size() // shared, 1, shared)
        mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("copies", "one", "tp"))
        units = split_by_dtype(model, [], set())
        share_layers(model, mesh)
        for unit in (*units, model):
            fully_shard(unit, mesh=mesh["copies", "one"], reshard_after_forward=False)
        return model


class WholeOptimizer(GatheredOptimizer):
    """Saves and loads an optimizer that steps distributed tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of a whole state; needs no other rank."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        shards = {
            index: {name: distribute_like(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": shards})


@torch.no_grad()
def gather_state(optimizer: Any, keep: bool) -> dict[str, Any]:
    """Return the whole state of an optimizer on the CPU, gathered tensor by tensor; empty unless kept. On all
    ranks."""
    state: dict[str, Any] = optimizer.state_dict()

    def gather(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = value.full_tensor()
        return whole.cpu() if keep else None

    whole = {
        index: {name: gather(value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": whole if keep else {}}


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Return all units of a sharded model, also under torch.compile's wrapper."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
