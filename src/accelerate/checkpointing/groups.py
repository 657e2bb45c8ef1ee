"""The groups of an optimizer in shards: their settings, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from accelerate.base import CheckpointError, listed
from accelerate.checkpointing.changes import Change
from accelerate.checkpointing.fit import check_form, check_optimizer
from accelerate.checkpointing.kept import inner_optimizers, keep_optimizer
from accelerate.checkpointing.local_shards import LocalShards, Place
from accelerate.checkpointing.part import Load
from accelerate.checkpointing.shard_index import ShardIndex

OPTIMIZER = "optimizer"
STATE = "state"
GROUPS = "param_groups"
PARAMETERS = "params"


def group_places(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[Place, Any]:
    """Return the settings of an optimizer's groups by their places.

    Args:
        groups: `param_groups`.
        names: for each group, the names of its parameters.
    """
    return {
        (OPTIMIZER, GROUPS, index, key): list(own) if key == PARAMETERS else value
        for index, (group, own) in enumerate(zip(groups, names, strict=True))
        for key, value in group.items()
    }


def refuse_strangers(found: ShardIndex, known: Container[str], groups: int, optimizer: Any) -> None:
    """Refuse the state of another optimizer.

    Args:
        found: what the shards hold.
        known: names of the parameters that the optimizer steps.
        groups: how many groups it has.
        optimizer: named in the message.

    Raises:
        CheckpointError: there are states of other parameters, or another number of groups, or files are
            missing.
    """
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    wrong = [place for place in found.places if not _is_place(place)]
    if wrong:
        raise CheckpointError(f"{found.folder} holds something else than an optimizer: {wrong[0]}.")
    found.check_files(found.places.values())  # before memory is reserved for what they shall hold
    strange = {str(place[2]) for place in found.places if place[1] == STATE and place[2] not in known}
    if strange:
        raise CheckpointError(
            f"{found.folder} does not fit this {kind}: it does not step {listed(sorted(strange))}. Prepare "
            "the models and optimizers in the order in which they were saved."
        )
    saved = {place[2] for place in found.places if place[1] == GROUPS}
    if saved != set(range(groups)):
        raise CheckpointError(
            f"{found.folder} holds {len(saved)} groups of parameters, and this {kind} has {groups}."
        )


def _is_place(place: Place) -> bool:
    kinds = {STATE: str, GROUPS: int}
    return len(place) == 4 and place[1] in kinds and isinstance(place[2], kinds[place[1]])


def loaded_groups(
    optimizer: Any, values: Mapping[Place, Any], places: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the groups of a state dict, with the settings that were read.

    Args:
        optimizer: has the groups.
        values: what was read.
        places: each name of a parameter -> which one it is; names of the same parameter have the same one.

    Raises:
        CheckpointError: the groups have other parameters.
    """
    own = optimizer.state_dict()[GROUPS]
    read: list[dict[str, Any]] = [{} for _ in own]
    for place, value in values.items():
        if place[1] == GROUPS:
            read[place[2]][place[3]] = value.shards[0].tensor if isinstance(value, LocalShards) else value
    for index, group in enumerate(read):
        parameters = group.pop(PARAMETERS, [])
        if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
            raise CheckpointError(f"Group {index} of the optimizer was saved without names of parameters.")
        saved: set[Any] = {places.get(name, name) for name in parameters}
        here = {number for name, number in places.items() if number in set(own[index][PARAMETERS])}
        if saved != here:
            names = [name for name, number in places.items() if number in here ^ saved]
            names += [name for name in saved if isinstance(name, str)]
            raise CheckpointError(
                f"Group {index} of the optimizer was saved with other parameters: {listed(names)}."
            )
        group.pop("param_names", None)
    return [{**before, **after} for before, after in zip(own, read, strict=True)]


def optimizer_change(
    optimizer: Any, states: Mapping[int, Any], groups: Sequence[Mapping[str, Any]], options: Load
) -> Change:
    """Return what brings an optimizer to a state.

    Args:
        optimizer: prepared or not.
        states: of its parameters, by their order.
        groups: with the numbers of their parameters.
        options: where it was read from.
    """

    def apply() -> None:
        with options.fitting(OPTIMIZER, type(optimizer).__name__):
            optimizer.load_state_dict({STATE: dict(states), GROUPS: [dict(group) for group in groups]})
            for inner in inner_optimizers(optimizer):
                check_optimizer(inner)

    return Change(apply, f"{type(optimizer).__name__} ({OPTIMIZER})", partial(keep_optimizer, optimizer))


Names = Sequence[Sequence[Sequence[str]]]
"""For each group, for each parameter, the names that it has; the usual one first."""


def by_name(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a whole state of an optimizer by the names of its parameters.

    Args:
        state: by their order.
        names: of the parameters.
    """
    first = [own[0] for group in names for own in group]
    return {
        STATE: {first[index]: values for index, values in state[STATE].items()},
        GROUPS: [
            {**group, PARAMETERS: [own[0] for own in each]}
            for group, each in zip(state[GROUPS], names, strict=False)
        ],
    }


class ByOrder:
    """Loads whole states of an optimizer by the order of its parameters, also those that name them.

    Args:
        owner: loads them by order.
        names: gives the names of the parameters, for states that have them.

    Attributes:
        kind: what messages call the owner.
        needs_all_ranks: whether all ranks load together.
    """

    def __init__(self, owner: Any, names: Callable[[], Names]) -> None:
        self.owner = owner
        self.kind = type(owner).__name__
        self.needs_all_ranks = bool(getattr(owner, "needs_all_ranks", False))
        self._names = names

    def state_dict(self) -> Any:
        """Return the state of the owner."""
        return self.owner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Raises:
            CheckpointError: it has states of other parameters, or other groups.
        """
        check_form(state)
        named = any(isinstance(key, str) for key in state[STATE]) or any(
            isinstance(each, str) for group in state[GROUPS] for each in group[PARAMETERS]
        )
        self.owner.load_state_dict(self._ordered(state) if named else state)

    def _ordered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        groups = self._names()
        flat = [own for group in groups for own in group]
        places = {name: index for index, own in enumerate(flat) for name in own}
        strange = sorted(str(name) for name in state[STATE] if name not in places)
        if strange:
            raise CheckpointError(f"The state is that of parameters it does not step: {listed(strange)}.")
        if len(state[GROUPS]) != len(groups):
            raise CheckpointError(f"The state has {len(state[GROUPS])} groups, and there are {len(groups)}.")
        count = iter(range(len(flat)))
        return {
            STATE: {places[name]: values for name, values in state[STATE].items()},
            GROUPS: [
                {**saved, PARAMETERS: [next(count) for _ in group]}
                for saved, group in zip(state[GROUPS], groups, strict=True)
            ],
        }
