"""Changes of objects to the states of a checkpoint.

Each part reads its files, verifies them and returns a `Change`. When all ranks have done so, `apply_all`
applies the changes. An error before that leaves every object unchanged, except for changes by load hooks. An
error after that names the objects that may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import CheckpointError, describe, like
from accelerate.checkpointing.compatibility import find_plain_optimizer, loads_its_own_way
from accelerate.checkpointing.local_shards import LocalShards, to_local_shards, to_tensor
from accelerate.ops import is_dtensor
from accelerate.weights import PinnedBuffers

Agree = Callable[[str], None]
"""Function that takes the error of this rank, or an empty string.

It raises a `CheckpointError` on all ranks if any rank has an error."""


class Stage(IntEnum):
    """Order of changes, between which the ranks agree that none has failed."""

    LOCAL = 0  # needs no other rank
    COLLECTIVE = 1  # all ranks take part
    GENERATORS = 2  # random number generators, from which the other changes may draw


@dataclass(frozen=True)
class Change:
    """Change of one object to a state that has been read and verified."""

    apply: Callable[[], None]
    name: str  # in error messages
    stage: Stage = Stage.LOCAL


no_change = Change(lambda: None, "")
"""Change for an object without state in the checkpoint."""


def describe_failure(action: Callable[[], Any], describe_error: Callable[[Exception], str] = describe) -> str:
    """Runs an action and returns its error as text, or an empty string."""
    try:
        action()
    except Exception as error:  # raised again, on all ranks, by the caller
        return describe_error(error)
    return ""


def apply_all(changes: Sequence[Change], agree: Agree) -> None:
    """Applies all changes on all ranks.

    Called on all ranks. A change that fails on any rank raises a `CheckpointError` on all, which names the
    objects that this rank has changed.
    """
    changed: list[str] = []
    for stage in Stage:
        failure = _apply([change for change in changes if change.stage == stage], changed)
        try:
            agree("" if failure is None else describe(failure))
        except CheckpointError as error:
            names = ", ".join(name for name in changed if name)
            text = f"A checkpoint was not loaded, and nothing was changed: {error}"
            if names:
                text = (
                    f"A checkpoint was not loaded: {error}. These objects have its state, or a part of it: "
                    f"{names}. The others are unchanged. Load another checkpoint, or start again."
                )
            explained = CheckpointError(text)
            raise explained if failure is None else like(explained, failure) from failure


def _apply(changes: Sequence[Change], changed: list[str]) -> Exception | None:
    """Applies changes until one fails, records their names, and returns the error."""
    for change in changes:
        changed.append(change.name)
        try:
            change.apply()
        except Exception as error:  # of any class, because all ranks raise it
            return error
    return None


# Copies of the values of a checkpoint into the tensors that models and optimizers have


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
    So are values in memory of states on the CPU, which are used without a copy.

    Args:
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

    def needs_no_copy(live: object, value: object) -> bool:
        if type(live) is not Tensor or type(value) is not Tensor or is_mapped:
            return False
        return live.is_cpu and value.is_cpu and not live.is_pinned()

    def fill_one(number: object, live: Any, value: Any) -> Any:
        if needs_no_copy(live, value):
            return value
        is_copied = copy_into(live, value, buffers)
        return live if is_copied else to_tensor(value, like.get(number), partial(own_tensor, number))

    def fill(number: object, values: object) -> Any:
        if not isinstance(values, Mapping):
            return values
        live = None if plain is None or number not in parameters else plain.state.get(parameters[number])
        tensors = live if isinstance(live, Mapping) else {}
        return {key: fill_one(number, tensors.get(key), value) for key, value in values.items()}

    return {number: fill(number, values) for number, values in states.items()}


@torch.no_grad()
def fill_weights(module: nn.Module, live: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights for `load_state_dict` with the tensors of a module, into which the values are copied.

    Values of another layout are unchanged, as are all values for a module with its own code to load weights.

    Args:
        live: Its tensors by their names.
    """
    if loads_its_own_way(module):
        return dict(weights)
    buffers = PinnedBuffers()
    return {
        name: live[name] if copy_into(live.get(name), value, buffers) else value
        for name, value in weights.items()
    }
