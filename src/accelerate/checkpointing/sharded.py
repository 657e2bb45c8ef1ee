"""Sharded models and optimizers, by the names of parameters: each process saves and reads its own shards."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accelerate.base import FSDP_MODEL_NAME, OPTIMIZER_NAME, CheckpointError, listed
from accelerate.checkpointing import shard_index
from accelerate.checkpointing.fit import check_form, check_optimizer, refuse_dtype, refuse_names
from accelerate.checkpointing.kept import inner_optimizers, keep_optimizer
from accelerate.checkpointing.local_shards import LocalShards, Place, rejoin, spread, whole
from accelerate.checkpointing.part import Change, Load, Part, Payload, Stage, nothing
from accelerate.checkpointing.parts import extra_changes, fill
from accelerate.checkpointing.shard_index import ShardIndex

MODEL = "model"
OPTIMIZER = "optimizer"
STATE = "state"
GROUPS = "param_groups"
PARAMETERS = "params"
FOLDERS = {MODEL: FSDP_MODEL_NAME, OPTIMIZER: OPTIMIZER_NAME}


class ShardOwner(Protocol):
    """What has a state in shards; nothing here needs another process."""

    @property
    def root(self) -> str:
        """MODEL or OPTIMIZER: the key under which the state lies."""
        ...

    def state(self) -> dict[Place, Any]:
        """Return the state: live tensors, what this process has of tensors, and other values."""
        ...

    def targets(self, found: ShardIndex, options: Load) -> dict[Place, LocalShards | None]:
        """Return memory for what this process reads; None for other values.

        Raises:
            CheckpointError: the shards are of something else.
        """
        ...

    def plan(self, values: Mapping[Place, Any], options: Load) -> Change:
        """Return what brings the object to a state that was read.

        Raises:
            CheckpointError: it does not fit.
        """
        ...


def folder_of(root: str, index: int) -> str:
    """Return the folder of an object's shards in a checkpoint.

    Args:
        root: MODEL or OPTIMIZER.
        index: place of the object among those of its kind.
    """
    return f"{FOLDERS[root]}_{index}"


@dataclass(frozen=True)
class ShardsPart:
    """What a process saves of an object in shards; `EitherPart` reads it back.

    Attributes:
        folder: where the shards lie in a checkpoint.
        content: the state, with what this process has of each tensor.
        rank: of this process.
    """

    folder: str
    content: Mapping[Place, Any]
    rank: int
    everywhere: bool = True

    def collect(self) -> list[Payload]:
        from accelerate.checkpointing import shard_files  # and with it DCP, which takes long to import

        return [shard_files.payload(self.folder, self.rank, self.content)]

    def read(self, options: Load) -> Change:
        return nothing


@dataclass(frozen=True)
class EitherPart:
    """An object that is read from shards or from one file, whichever a checkpoint has.

    Attributes:
        folder: where the shards lie in a checkpoint.
        owner: gives what reads the shards.
        whole: reads the file.
    """

    folder: str
    owner: Callable[[], ShardOwner]
    whole: Part

    @property
    def everywhere(self) -> bool:
        """Whether each process has one of its own."""
        return self.whole.everywhere

    def collect(self) -> list[Payload]:
        return self.whole.collect()

    def read(self, options: Load) -> Change:
        if not options.has(f"{self.folder}/{shard_index.NAME}"):
            return self.whole.read(options)
        return read_shards(self.folder, self.owner(), options)


def read_shards(folder: str, owner: ShardOwner, options: Load) -> Change:
    """Read what this process needs of a state in shards.

    Args:
        folder: where the shards lie in the checkpoint.
        owner: what is brought to the state.
        options: how the checkpoint is read.

    Returns:
        What brings it there; nothing is changed yet.

    Raises:
        CheckpointError: a file is missing or broken, or the shards are of something else.
    """
    from accelerate.checkpointing import shard_files

    trusted = options.reading.get("weights_only") is False
    found = shard_index.read(options.folder / folder, owner.root, trusted=trusted)
    values = shard_files.read(found, owner.targets(found, options), options.reading)
    return owner.plan(values, options)


@dataclass(frozen=True)
class ModuleShards:
    """The weights of a module with plain or distributed tensors.

    Attributes:
        module: without wrappers.
    """

    module: nn.Module
    root: str = MODEL

    def state(self) -> dict[Place, Any]:
        return {(MODEL, name): value for name, value in self.module.state_dict(keep_vars=True).items()}

    def targets(self, found: ShardIndex, options: Load) -> dict[Place, LocalShards | None]:
        return model_targets(self.module, self.state(), found, options)

    def plan(self, values: Mapping[Place, Any], options: Load) -> Change:
        state = {place[1]: value for place, value in values.items()}
        name = f"{type(self.module).__name__} ({FSDP_MODEL_NAME})"
        first = extra_changes(self.module, state, options, name)
        return Change(partial(self._apply, values, options), name, stage=Stage.LAST, first=first)

    def _apply(self, values: Mapping[Place, Any], options: Load) -> None:
        live = self.state()
        state = {
            place[1]: rejoin(value, live.get(place)) if isinstance(value, LocalShards) else value
            for place, value in values.items()
        }
        with options.fitting(FSDP_MODEL_NAME, type(self.module).__name__):
            fill(self.module, state, options.folder / FSDP_MODEL_NAME, options.model)


def model_targets(
    module: nn.Module, live: Mapping[Place, Any], found: ShardIndex, options: Load
) -> dict[Place, LocalShards | None]:
    """Return memory for the weights of a model.

    Args:
        module: the model.
        live: its weights.
        found: what the shards hold.
        options: `strict` of the models, True unless given.

    Raises:
        CheckpointError: names or shapes do not fit.
    """
    own = {place: spread(value, 0, 0) for place, value in live.items()}
    common = [place for place in own if place in found.places]
    if options.model.get("strict", True):
        strange = [str(place[1]) for place in found.places if place not in own]
        there = {id(live[place]) for place in common}  # a tensor that has several names needs one
        lacking = [str(place[1]) for place, value in live.items() if id(value) not in there]
        refuse_names(found.folder, module, lacking, strange)
    other = [
        f"{place[1]} {found.shape(place)} instead of {each.shape}"
        for place in common
        if isinstance(each := own[place], LocalShards) and found.shape(place) not in (None, each.shape)
    ]
    if other:
        raise CheckpointError(f"{found.folder} holds tensors of other shapes: {listed(other)}.")
    _refuse_kinds(own, found, common)
    return {
        place: each.emptied(found.entry(place).properties.dtype)  # type: ignore[union-attr]
        if isinstance(each := own[place], LocalShards) and found.shape(place) is not None
        else None
        for place in common
    }


def _refuse_kinds(own: Mapping[Place, Any], found: ShardIndex, common: Sequence[Place]) -> None:
    """Refuse what is a tensor on one side only, and numbers that would lose a part of them."""
    reasons = []
    for place in common:
        entry, each = found.entry(place), own[place]
        if isinstance(each, LocalShards) != hasattr(entry, "properties"):
            reasons.append(f"{place[1]} is a tensor on one side only")
        elif isinstance(each, LocalShards):
            dtype: torch.dtype = entry.properties.dtype  # type: ignore[union-attr]
            reasons.append(refuse_dtype(place[1], each.dtype, dtype))
    if wrong := [reason for reason in reasons if reason]:
        raise CheckpointError(f"{found.folder} does not fit this model: {listed(wrong)}.")


@dataclass(frozen=True)
class OptimizerShards:
    """The state of an optimizer of plain or distributed tensors, by the names of its parameters.

    Attributes:
        optimizer: prepared or not.
        names: for each of its groups, for each parameter the names that it has; the first one is saved.
    """

    optimizer: Any
    names: Sequence[Sequence[Sequence[str]]]
    root: str = OPTIMIZER

    def state(self) -> dict[Place, Any]:
        found = self.optimizer.state_dict()
        first = [names[0] for group in self.names for names in group]
        states = {
            (OPTIMIZER, STATE, first[index], key): value
            for index, values in found[STATE].items()
            for key, value in values.items()
        }
        return {**states, **group_places(found[GROUPS], [[n[0] for n in group] for group in self.names])}

    def targets(self, found: ShardIndex, options: Load) -> dict[Place, LocalShards | None]:
        known = {name: p for name, (_, p) in self._by_name().items()}
        refuse_strangers(found, known, len(self.names), self.optimizer)
        return {place: self._target(place, known, found) for place in found.places}

    def _target(self, place: Place, known: Mapping[str, Tensor], found: ShardIndex) -> LocalShards | None:
        shape = found.shape(place)
        if shape is None:
            return None
        dtype = found.entry(place).properties.dtype  # type: ignore[union-attr]
        parameter = known.get(place[2]) if place[1] == STATE else None
        if parameter is not None and tuple(parameter.shape) == shape:
            own = spread(parameter, 0, 0)
            assert isinstance(own, LocalShards)
            return own.emptied(dtype)
        return whole(torch.empty(shape, dtype=dtype))

    def plan(self, values: Mapping[Place, Any], options: Load) -> Change:
        by_name = self._by_name()
        states: dict[int, dict[str, Any]] = {}
        for place, value in values.items():
            if place[1] == STATE:
                index, parameter = by_name[place[2]]
                joined = rejoin(value, parameter) if isinstance(value, LocalShards) else value
                states.setdefault(index, {})[place[3]] = joined
        same = {name: index for name, (index, _) in by_name.items()}
        groups = loaded_groups(self.optimizer, values, same)
        return optimizer_change(self.optimizer, states, groups, options)

    def _by_name(self) -> dict[str, tuple[int, Tensor]]:
        flat = [names for group in self.names for names in group]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        pairs = zip(flat, parameters, strict=True)
        return {name: (index, p) for index, (names, p) in enumerate(pairs) for name in names}


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
