"""Whole states of optimizers whose parameters are distributed tensors: the same file for every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


class WholeOptimizer:
    """Saves and loads an optimizer as one process would: with whole tensors, by the order of parameters.

    Args:
        optimizer: steps distributed tensors; plain ones are as they are.
        state: as `gather_state` returns it, where it is to be saved.
    """

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
        optimizer: steps distributed tensors.
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
    return {name: own_part(value, parameter) for name, value in values.items()}


def own_part(value: Any, like: torch.Tensor) -> Any:
    """Return what a rank keeps of a whole tensor that is spread like another; anything else as it is.

    Args:
        value: a whole tensor, the same on all ranks.
        like: a tensor of the same shape, or one of another shape that the value has nothing to do with.
    """
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
