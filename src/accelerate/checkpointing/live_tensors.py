"""Copies of the values of a checkpoint into the tensors that models and optimizers have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.checkpointing.compatibility import find_plain_optimizer, loads_its_own_way
from accelerate.checkpointing.local_shards import LocalShards, to_local_shards, to_tensor
from accelerate.ops import is_dtensor
from accelerate.weights import PinnedBuffers


def copy_into(live: Any, value: Any, buffers: PinnedBuffers) -> bool:
    """Copies local shards, or a whole tensor, into a plain or distributed tensor.

    Returns:
        Whether the value has the shape, dtype and layout of the tensor. False copies nothing.
    """
    is_plain = type(live) in (Tensor, nn.Parameter) and live.layout == torch.strided and not live.is_meta
    if is_plain and type(value) is Tensor:
        is_equal = (live.shape, live.dtype, live.layout) == (value.shape, value.dtype, value.layout)
        if is_equal:
            buffers.copy(live.detach(), value)
        return is_equal
    if not is_plain and not is_dtensor(live):
        return False
    own, read = (to_local_shards(each, 0, 0) for each in (live, value))
    if not isinstance(own, LocalShards) or not isinstance(read, LocalShards):
        return False
    if _layout(own) != _layout(read):
        return False
    for target, source in zip(own.shards, read.shards, strict=True):
        buffers.copy(target.tensor, source.tensor)
    return True


def _layout(value: LocalShards) -> tuple[Any, ...]:
    boxes = [
        (shard.offsets, shard.tensor.shape, shard.tensor.layout, type(shard.tensor)) for shard in value.shards
    ]
    return value.shape, value.dtype, boxes


@torch.no_grad()
def fill_states(
    optimizer: torch.optim.Optimizer,
    states: Mapping[Any, Any],
    parameters: Mapping[Any, Tensor],
    like: Mapping[Any, Tensor | None],
    *,
    is_mapped: bool,
) -> dict[Any, Any]:
    """Returns states of an optimizer with its own tensors, into which the values are copied.

    Values of another layout, and those of states that the optimizer does not have yet, are in other tensors.

    Args:
        optimizer: Optimizer, which may be in wrappers.
        states: Tensors, local shards and other values, by the numbers of parameters.
        parameters: Parameters of the optimizer by their numbers.
        like: Tensors by which states are distributed, by the numbers of parameters.
        is_mapped: Whether values may be views of a file, which are not kept.
    """
    plain, buffers = find_plain_optimizer(optimizer), PinnedBuffers()

    def own_tensor(number: object, value: Tensor) -> Tensor:
        parameter = None if plain is None else parameters.get(number)
        if parameter is not None and buffers.accepts(value, parameter.device):
            return buffers.to(value, parameter.device)
        return value.clone() if is_mapped else value

    def fill(number: object, values: object) -> Any:
        if not isinstance(values, Mapping):
            return values
        live = None if plain is None or number not in parameters else plain.state.get(parameters[number])
        tensors = live if isinstance(live, Mapping) else {}
        return {
            key: tensors[key]
            if copy_into(tensors.get(key), value, buffers)
            else to_tensor(value, like.get(number), partial(own_tensor, number))
            for key, value in values.items()
        }

    return {number: fill(number, values) for number, values in states.items()}


@torch.no_grad()
def fill_weights(module: nn.Module, live: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights for `load_state_dict` with the tensors of a module, into which the values are copied.

    Values of another layout are unchanged, as are all values for a module with its own code to load weights.

    Args:
        live: Its tensors by their names.
        weights: Tensors, local shards and other values by the names of tensors.
    """
    if loads_its_own_way(module):
        return dict(weights)
    buffers = PinnedBuffers()
    return {
        name: live[name] if copy_into(live.get(name), value, buffers) else value
        for name, value in weights.items()
    }
