"""Sharded models and optimizers, by the names of parameters: each process saves and reads its own shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accelerate.base import FSDP_MODEL_NAME, OPTIMIZER_NAME, CheckpointError, listed
from accelerate.checkpointing import shard_index
from accelerate.checkpointing.changes import Change, Stage, inner_optimizers, keep_optimizer
from accelerate.checkpointing.fit import check_form, check_optimizer, check_weights
from accelerate.checkpointing.local_shards import KeyPath, LocalShards, rejoin, spread, whole
from accelerate.checkpointing.parts import Load, Part, Payload, extra_changes, fill
from accelerate.checkpointing.shard_index import ShardIndex
from accelerate.weights import is_extra

MODEL = "model"
OPTIMIZER = "optimizer"
STATE = "state"
GROUPS = "param_groups"
PARAMETERS = "params"
FOLDERS = {MODEL: FSDP_MODEL_NAME, OPTIMIZER: OPTIMIZER_NAME}

Names = Sequence[Sequence[Sequence[str]]]
"""For each group, for each parameter, the names that it has; the first one is saved."""


class ShardOwner(Protocol):
    """What has a state in shards; nothing here needs another process."""

    @property
    def root(self) -> str:
        """MODEL or OPTIMIZER: the key of the state."""
        ...

    def state(self) -> dict[KeyPath, Any]:
        """Return the state: live tensors, what this process has of tensors, and other values."""
        ...

    def targets(self, index: ShardIndex, options: Load) -> dict[KeyPath, LocalShards | None]:
        """Return memory for what this process reads; None for other values."""
        ...

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        """Return what brings the object to a state that was read."""
        ...


def folder_of(root: str, index: int) -> str:
    """Return the folder of an object's shards in a checkpoint."""
    return f"{FOLDERS[root]}_{index}"


@dataclass(frozen=True)
class EitherPart:
    """An object that is read from shards or from one file, whichever a checkpoint has."""

    folder: str
    owner: Callable[[], ShardOwner]
    whole: Part

    def collect(self, leads: bool = True) -> list[Payload]:
        return self.whole.collect(leads)

    def read(self, options: Load) -> Change:
        if not options.has(f"{self.folder}/{shard_index.NAME}"):
            return self.whole.read(options)
        return read_shards(self.folder, self.owner(), options)


def read_shards(folder: str, owner: ShardOwner, options: Load) -> Change:
    """Read what this process needs of a state in shards; nothing is changed yet."""
    from accelerate.checkpointing import shard_files  # and with it DCP, which takes long to import

    trusted = options.reading.get("weights_only") is False
    index = shard_index.read(options.folder / folder, owner.root, trusted=trusted)
    values = shard_files.read(index, owner.targets(index, options), options.reading)
    return owner.plan(values, options)


@dataclass(frozen=True)
class ModuleShards:
    """The weights of a module, without wrappers, with plain or distributed tensors."""

    module: nn.Module
    root: str = MODEL

    def state(self) -> dict[KeyPath, Any]:
        return {(MODEL, name): value for name, value in self.module.state_dict(keep_vars=True).items()}

    def targets(self, index: ShardIndex, options: Load) -> dict[KeyPath, LocalShards | None]:
        return model_targets(self.module, self.state(), index, options)

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        name = f"{type(self.module).__name__} ({FSDP_MODEL_NAME})"
        extra = {path[1]: rejoin(value) for path, value in values.items() if is_extra(path[1])}
        first = extra_changes(self.module, extra, options, name)
        return Change(partial(self._apply, values, options), name, stage=Stage.LAST, first=first)

    def _apply(self, values: Mapping[KeyPath, Any], options: Load) -> None:
        live = self.state()
        state = {path[1]: rejoin(value, live.get(path)) for path, value in values.items()}
        with options.fitting(FSDP_MODEL_NAME, type(self.module).__name__):
            fill(self.module, state, options.folder / FSDP_MODEL_NAME, options.model)


def model_targets(
    module: nn.Module, live: Mapping[KeyPath, Any], index: ShardIndex, options: Load
) -> dict[KeyPath, LocalShards | None]:
    """Return memory for the weights of a model."""
    own = {str(path[1]): value for path, value in live.items()}
    stored = {str(path[1]): index.stored(path) for path in index.paths}
    check_weights(own, stored, index.folder, module, strict=options.model.get("strict", True))
    return {path: memory_for(stored[path[1]], value) for path, value in live.items() if path[1] in stored}


def memory_for(stored: Tensor | None, own: Any = None) -> LocalShards | None:
    """Return memory on the CPU: for the boxes that this process has of a tensor of the same shape, else
    for the whole; None for another value than a tensor."""
    if stored is None:
        return None
    local = spread(own, 0, 0)
    if isinstance(local, LocalShards) and local.shape == tuple(stored.shape):
        return local.emptied(stored.dtype)
    return whole(torch.empty_like(stored, device="cpu"))


@dataclass(frozen=True)
class OptimizerShards:
    """The state of an optimizer of plain or distributed tensors, by the names of its parameters."""

    optimizer: Any
    names: Names
    root: str = OPTIMIZER

    def state(self) -> dict[KeyPath, Any]:
        named = by_name(self.optimizer.state_dict(), self.names)
        states = {
            (OPTIMIZER, STATE, name, key): value
            for name, values in named[STATE].items()
            for key, value in values.items()
        }
        return {**states, **group_paths(named[GROUPS], [group[PARAMETERS] for group in named[GROUPS]])}

    def targets(self, index: ShardIndex, options: Load) -> dict[KeyPath, LocalShards | None]:
        numbers, parameters = _numbers(self.names), self._parameters()
        refuse_other_optimizer(index, numbers, len(self.names), self.optimizer)
        return {
            path: memory_for(index.stored(path), parameters[numbers[path[2]]] if path[1] == STATE else None)
            for path in index.paths
        }

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        numbers, parameters = _numbers(self.names), self._parameters()
        states: dict[int, dict[str, Any]] = {}
        for path, value in values.items():
            if path[1] == STATE:
                number = numbers[path[2]]
                states.setdefault(number, {})[path[3]] = rejoin(value, parameters[number])
        groups = loaded_groups(self.optimizer, values, numbers)
        return optimizer_change(self.optimizer, states, groups, options)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _numbers(names: Names) -> dict[str, int]:
    """Return each name of a parameter with the number that the parameter has in a state dict."""
    flat = [own for group in names for own in group]
    return {name: number for number, own in enumerate(flat) for name in own}


def group_paths(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[KeyPath, Any]:
    """Return the settings of an optimizer's groups by their paths."""
    return {
        (OPTIMIZER, GROUPS, index, key): list(own) if key == PARAMETERS else value
        for index, (group, own) in enumerate(zip(groups, names, strict=True))
        for key, value in group.items()
    }


def refuse_other_optimizer(index: ShardIndex, known: Container[str], groups: int, optimizer: Any) -> None:
    """Refuse the state of another optimizer."""
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    wrong = [path for path in index.paths if not _is_key_path(path)]
    if wrong:
        raise CheckpointError(f"{index.folder} holds something else than an optimizer: {wrong[0]}.")
    index.check_files(index.paths.values())  # before memory is reserved for what they shall hold
    strange = {str(path[2]) for path in index.paths if path[1] == STATE and path[2] not in known}
    if strange:
        raise CheckpointError(
            f"{index.folder} does not fit this {kind}: it does not step {listed(sorted(strange))}. Prepare "
            "the models and optimizers in the order in which they were saved."
        )
    saved = {path[2] for path in index.paths if path[1] == GROUPS}
    if saved != set(range(groups)):
        raise CheckpointError(
            f"{index.folder} holds {len(saved)} groups of parameters, and this {kind} has {groups}."
        )


def _is_key_path(path: KeyPath) -> bool:
    kinds = {STATE: str, GROUPS: int}
    return len(path) == 4 and path[1] in kinds and isinstance(path[2], kinds[path[1]])


def loaded_groups(
    optimizer: Any, values: Mapping[KeyPath, Any], numbers: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the groups of a state dict, with the settings that were read; names of one parameter have one
    number."""
    own = optimizer.state_dict()[GROUPS]
    read: list[dict[str, Any]] = [{} for _ in own]
    for path, value in values.items():
        if path[1] == GROUPS:
            read[path[2]][path[3]] = rejoin(value)
    for index, group in enumerate(read):
        parameters = group.pop(PARAMETERS, [])
        if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
            raise CheckpointError(f"Group {index} of the optimizer was saved without names of parameters.")
        saved: set[Any] = {numbers.get(name, name) for name in parameters}
        here = {number for name, number in numbers.items() if number in set(own[index][PARAMETERS])}
        if saved != here:
            names = [name for name, number in numbers.items() if number in here ^ saved]
            names += [name for name in saved if isinstance(name, str)]
            raise CheckpointError(
                f"Group {index} of the optimizer was saved with other parameters: {listed(names)}."
            )
        group.pop("param_names", None)
    return [{**before, **after} for before, after in zip(own, read, strict=True)]


def optimizer_change(
    optimizer: Any, states: Mapping[int, Any], groups: Sequence[Mapping[str, Any]], options: Load
) -> Change:
    """Return what brings an optimizer to states, by the order of its parameters, and groups with their
    numbers."""

    def apply() -> None:
        with options.fitting(OPTIMIZER, type(optimizer).__name__):
            optimizer.load_state_dict({STATE: dict(states), GROUPS: [dict(group) for group in groups]})
            for inner in inner_optimizers(optimizer):
                check_optimizer(inner)

    return Change(apply, f"{type(optimizer).__name__} ({OPTIMIZER})", partial(keep_optimizer, optimizer))


def by_name(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a whole state of an optimizer by the names of its parameters."""
    first = [own[0] for group in names for own in group]
    return {
        STATE: {first[index]: values for index, values in state[STATE].items()},
        GROUPS: [
            {**group, PARAMETERS: [own[0] for own in parameters]}
            for group, parameters in zip(state[GROUPS], names, strict=False)
        ],
    }


class ByOrder:
    """Loads whole states of an optimizer by the order of its parameters, also those that name them."""

    def __init__(self, owner: Any, names: Callable[[], Names]) -> None:
        self.owner = owner
        self.kind = type(owner).__name__
        self.needs_all_ranks = bool(getattr(owner, "needs_all_ranks", False))
        self._names = names

    def state_dict(self) -> Any:
        """Return the state of the owner."""
        return self.owner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        check_form(state)
        keys = [*state[STATE], *(parameter for group in state[GROUPS] for parameter in group[PARAMETERS])]
        is_named = any(isinstance(key, str) for key in keys)
        self.owner.load_state_dict(self._ordered(state) if is_named else state)

    def _ordered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        groups = self._names()
        numbers, count = _numbers(groups), itertools.count()
        strange = sorted(str(name) for name in state[STATE] if name not in numbers)
        if strange:
            raise CheckpointError(f"The state is that of parameters it does not step: {listed(strange)}.")
        if len(state[GROUPS]) != len(groups):
            raise CheckpointError(f"The state has {len(state[GROUPS])} groups, and there are {len(groups)}.")
        return {
            STATE: {numbers[name]: values for name, values in state[STATE].items()},
            GROUPS: [
                {**saved, PARAMETERS: [next(count) for _ in group]}
                for saved, group in zip(state[GROUPS], groups, strict=True)
            ],
        }
