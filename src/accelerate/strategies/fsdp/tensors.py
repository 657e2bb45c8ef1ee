"""Training with parameters that are distributed tensors: norms, loading, whole states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from accelerate.strategies.bundle import as_list
from accelerate.strategies.fsdp import clipping
from accelerate.strategies.fsdp.base import Sharded


class DistributedTensors(Sharded):
    """What does not depend on the axes over which tensors are distributed."""

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients by their norm over all ranks; return it as a plain tensor."""
        parameters = as_list(parameters)
        norm = clipping.measure(parameters, norm_type, self.context.device)
        clipping.scale_down(parameters, norm, max_norm)
        return norm

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        """Return what saves and loads the optimizers with whole tensors."""
        keep = self.context.topology.local_rank == 0
        return [
            WholeOptimizer(optimizer, gather_state(optimizer, keep) if gather else None)
            for optimizer in optimizers
        ]

    def load_weights(
        self, model: nn.Module, state: Mapping[str, Any], fill: Callable[[nn.Module, Mapping[str, Any]], None]
    ) -> None:
        """Load this rank's part of whole weights."""
        inner = self.unwrap(model, keep_compiled=False)
        targets = inner.state_dict(keep_vars=True)
        fill(inner, {name: distribute_like(value, targets.get(name, value)) for name, value in state.items()})

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


class WholeOptimizer:
    """Saves and loads an optimizer as one process would: with whole tensors, by the order of parameters."""

    def __init__(self, optimizer: Any, state: Mapping[str, Any] | None = None) -> None:
        self.optimizer = optimizer
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that was gathered."""
        assert self._state is not None
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's part of a whole state; needs no other rank."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        parts = {index: _part(values, parameters[index]) for index, values in state["state"].items()}
        self.optimizer.load_state_dict({**state, "state": parts})


@torch.no_grad()
def gather_state(optimizer: Any, keep: bool) -> dict[str, Any]:
    """Return the whole state of an optimizer on the CPU, gathered tensor by tensor; called on all ranks.

    Args:
        keep: whether this rank keeps it; others get an empty state.
    """
    state: dict[str, Any] = optimizer.state_dict()
    whole = {
        index: {name: _gathered(value, keep) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": whole if keep else {}}


def _gathered(value: Any, keep: bool) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
        return value.cpu() if keep else None
    return value


def _part(values: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {name: distribute_like(value, parameter) for name, value in values.items()}


def distribute_like(value: Any, like: torch.Tensor) -> Any:
    """Return what a rank keeps of a whole tensor that is spread like another; anything else as it is.

    Args:
        like: a tensor of the same shape, or one of another shape that the value has nothing to do with.
    """
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
