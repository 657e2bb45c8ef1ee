"""State of a rank that a joining replica group receives from another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.strategies import Prepared


@dataclass(frozen=True)
class Shard:
    """Shard of a DTensor, which the receiver puts on its own mesh."""

    local: Tensor


@torch.no_grad()
def capture(prepared: Prepared, scaler: Any) -> dict[str, Any]:
    """Returns the state of the prepared objects on this rank, with shards in place of DTensors."""
    return {
        "models": [_to_shards(_weights_of(model)) for model in prepared.models],
        "optimizers": [_to_shards(optimizer.optimizer.state_dict()) for optimizer in prepared.optimizers],
        "updates": [optimizer.num_updates for optimizer in prepared.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
        "updates_at_call": [scheduler.updates_at_call for scheduler in prepared.schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
        "custom": [obj.state_dict() for obj in prepared.custom],
        "averages": [average.tensors() for average in prepared.averages],
    }


def _weights_of(model: nn.Module) -> dict[str, Any]:
    """Returns the weights of a model, and copies of its buffers.

    The state is sent during the next step, whose forwards may change buffers.
    """
    state = model.state_dict(keep_vars=True)
    return {
        name: value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value
        for name, value in state.items()
    }


@torch.no_grad()
def apply(state: Mapping[str, Any], prepared: Prepared, scaler: Any) -> None:
    """Loads the state that `capture` returned on the same rank of another replica group."""
    for model, weights in zip(prepared.models, state["models"], strict=True):
        targets = model.state_dict(keep_vars=True)
        for name, value in weights.items():
            target = targets[name]
            if isinstance(value, Shard):
                target.to_local().copy_(value.local)
            elif isinstance(value, Tensor):
                target.copy_(value)
    for optimizer, saved in zip(prepared.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(_from_shards(saved, optimizer))
    for optimizer, updates in zip(prepared.optimizers, state["updates"], strict=True):
        optimizer.num_updates = updates
    for scheduler, saved in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    for scheduler, updates in zip(prepared.schedulers, state["updates_at_call"], strict=True):
        scheduler.record_call(updates)
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    for obj, saved in zip(prepared.custom, state["custom"], strict=True):
        obj.load_state_dict(saved)
    for average, saved in zip(prepared.averages, state["averages"], strict=True):
        for own, value in zip(average.tensors(), saved, strict=True):
            own.copy_(value)


def _to_shards(values: Any) -> Any:
    def to_shard(tensor: Any) -> Any:
        return Shard(tensor.to_local()) if hasattr(tensor, "to_local") else tensor.detach()

    return torch_private.pytree.tree_map_only(Tensor, to_shard, values)


def _from_shards(saved: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Returns the state dict of an optimizer, with shards on the meshes of its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))

    def whole(value: Any, parameter: Any) -> Any:
        if not isinstance(value, Shard):
            return value
        return type(parameter.data).from_local(
            value.local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    state = {
        number: {key: whole(value, by_number[number]) for key, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}
