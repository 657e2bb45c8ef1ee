"""States of the matrices that ranks own, in whole state dicts of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accelerate.checkpointing import distribute
from accelerate.nested import recursively_apply
from accelerate.ops import current_transport
from accelerate.strategies.dtensors import distribute_like

if TYPE_CHECKING:
    import torch


class Owners:
    """Observer of an optimizer whose ranks each own some of its parameters."""

    def owners(self) -> list[int | None]:
        """Returns the rank that owns each parameter of all groups, or None for those stepped in shards."""
        raise NotImplementedError


def owners_of(optimizer: torch.optim.Optimizer) -> Owners | None:
    """Returns the owners of the parameters of a prepared optimizer, or None if ranks own none."""
    observers = getattr(optimizer, "observers", ())
    return next((each for each in observers if isinstance(each, Owners)), None)


def owned_states(optimizer: torch.optim.Optimizer) -> list[bool | None]:
    """Returns for each parameter whether this rank owns its state, None for states that are like shards.

    The list is empty for an optimizer whose ranks own no matrices.
    """
    owners = owners_of(optimizer)
    if owners is None:
        return []
    rank = current_transport().rank
    return [None if owner is None else owner == rank for owner in owners.owners()]


def local_states(
    values: Mapping[str, Any],
    parameter: Tensor,
    is_owned: bool | None,
    placements: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Returns the part of the whole state of a parameter on this rank, or None if it is on another rank.

    Args:
        is_owned: Whether this rank has the whole state, or None if all ranks share it.
        placements: Placements of each tensor, None for a plain one. By default those with the shape of the
            parameter are distributed like it.
    """
    if is_owned is False:
        return None
    if is_owned:
        return dict(values)
    if placements is None:
        return {name: distribute_like(value, parameter) for name, value in values.items()}
    return {
        name: value if placements[name] is None else distribute(value, parameter, placements[name])
        for name, value in values.items()
    }


def gather_owned_states(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], keep: bool
) -> dict[str, Any]:
    """Returns the state dict of an optimizer with the states of the matrices of all ranks, on the CPU.

    Called on all ranks. The states are sent one by one, so that other ranks need memory for one of them.

    Args:
        keep: Whether to return states. False returns a state dict without them.
    """
    states: dict[int, Any] = dict(state["state"])
    owners = owners_of(optimizer)
    for number, owner in enumerate([] if owners is None else owners.owners()):
        if owner is None:
            continue
        own = recursively_apply(Tensor.cpu, states.get(number))
        values = current_transport().broadcast_object(own, owner)
        if values is not None:
            states[number] = values if keep else None
    ordered = sorted(states.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    return {**state, "state": dict(ordered) if keep else {}}
