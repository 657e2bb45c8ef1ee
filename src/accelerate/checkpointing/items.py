"""Stateful objects of a run as data, from which checkpoints and copies in memory are made.

`accelerator/state_items.py` lists the items of a run. Checkpoints and the fast tier use their parts. Replica
groups, and ranks that train separately, use `capture` and `apply`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from accelerate.base import CheckpointError
from accelerate.checkpointing.compatibility import GROUPS, PARAMETERS, STATE
from accelerate.checkpointing.local_shards import LocalShards, copy_shards, to_local_shards, to_tensor
from accelerate.checkpointing.parts import Part, map_like
from accelerate.nested import recursively_apply
from accelerate.ops import is_dtensor

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer


@dataclass(frozen=True)
class StateItem:
    """Stateful object of a run.

    Attributes:
        kind: The kind, such as "optimizers", of which a run may have several in the order of preparation.
        part: Its part of a checkpoint. None if the manifest has its state, or no file.
        held_by: The ranks that have the state: "all" if it is equal on all ranks, "shards" if it may be
            sharded over them, "rank" if each rank has its own.
        capture: Returns the state on this rank, with references to live tensors and with local shards in
            place of distributed tensors. None if only checkpoints have the state.
        apply: Loads a state that `capture` returned on this rank, also in another replica group.
    """

    kind: str
    owner: Any
    part: Part | None = None
    held_by: Literal["all", "shards", "rank"] = "all"
    capture: Callable[[], Any] | None = None
    apply: Callable[[Any], None] | None = None


def object_item(kind: str, owner: Any, part: Part | None = None) -> StateItem:
    """Returns the item of an object with `state_dict` and `load_state_dict`, which all ranks have."""

    def capture() -> Any:
        return take_shards(owner.state_dict())

    def apply(state: dict[str, Any]) -> None:
        owner.load_state_dict(map_like(to_tensor, state, owner.state_dict()))

    return StateItem(kind, owner, part, capture=capture, apply=apply)


def optimizer_item(optimizer: AcceleratedOptimizer, part: Part | None = None) -> StateItem:
    """Returns the item of a prepared optimizer."""

    def capture() -> Any:
        return take_shards(optimizer.optimizer.state_dict())

    def apply(state: Mapping[str, Any]) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group[PARAMETERS])
        numbers = (number for group in state[GROUPS] for number in group[PARAMETERS])
        live = dict(zip(numbers, parameters, strict=True))
        like = {
            number: dict.fromkeys(values, live.get(number))
            for number, values in state[STATE].items()
            if isinstance(values, Mapping)
        }
        own = map_like(to_tensor, state[STATE], like)
        optimizer.load_state_dict({**state, STATE: own})

    return StateItem("optimizers", optimizer, part, "shards", capture, apply)


def model_item(model: nn.Module, part: Part | None = None) -> StateItem:
    """Returns the item of a prepared model."""

    def capture() -> Any:
        def copy_buffer(value: Any) -> Any:  # the next forwards change it, while the state may still be sent
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            return value.clone() if is_buffer else value

        state = model.state_dict(keep_vars=True)
        return take_shards({name: copy_buffer(value) for name, value in state.items()})

    def apply(state: Mapping[str, Any]) -> None:
        live = model.state_dict(keep_vars=True)
        for name, value in state.items():
            own = to_local_shards(live[name], 0, 0)
            if isinstance(value, LocalShards) and isinstance(own, LocalShards):
                copy_shards(own, value)
            elif isinstance(value, Tensor):
                live[name].copy_(value)

    return StateItem("models", model, part, "shards", capture, apply)


def take_shards(state: Mapping[str, Any]) -> Any:
    """Returns a nested state with local shards in place of distributed tensors, and detached tensors."""

    def take(tensor: Tensor) -> Any:
        return to_local_shards(tensor, 0, 0) if is_dtensor(tensor) else tensor.detach()

    return recursively_apply(take, state)


@torch.no_grad()
def capture_items(items: Iterable[StateItem]) -> dict[str, list[Any]]:
    """Returns the states of items on this rank, by kind, without items that have none in memory."""
    states: dict[str, list[Any]] = {}
    for item in items:
        if item.capture is not None:
            states.setdefault(item.kind, []).append(item.capture())
    return states


def check_items(items: Iterable[StateItem], states: Mapping[str, Sequence[Any]]) -> None:
    """Raises an error for states of other numbers of objects than those of items."""
    counts = Counter(item.kind for item in items if item.capture is not None)
    for kind in counts.keys() | states.keys():
        if (number := len(states.get(kind, ()))) != counts[kind]:
            raise CheckpointError(f"the state has {number} {kind}, and this run has {counts[kind]}")


@torch.no_grad()
def apply_items(items: Iterable[StateItem], states: Mapping[str, Sequence[Any]]) -> None:
    """Loads states that `capture_items` returned for the same items."""
    left: dict[str, Iterator[Any]] = {}
    for item in items:
        if item.apply is not None:
            item.apply(next(left.setdefault(item.kind, iter(states[item.kind]))))
