"""States of models and optimizers in shards, by the names of parameters.

A `ShardedState` returns the shards that are on this rank to save them, and loads shards of any layout. No
rank communicates. The classes here are for plain and distributed tensors. Those for FSDP 1 are in
`strategies/fsdp/flat_states.py`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accelerate.base import FSDP_MODEL_NAME, CheckpointError, listed
from accelerate.checkpointing import shard_index
from accelerate.checkpointing.changes import Change, Stage, fill_states, fill_weights
from accelerate.checkpointing.compatibility import (
    GROUPS,
    PARAMETERS,
    STATE,
    Names,
    check_optimizer,
    check_weights,
    class_name,
    has_form,
    live_state,
    parameter_numbers,
)
from accelerate.checkpointing.local_shards import LocalShards, PlainValue, single_shard, target_of, to_tensor
from accelerate.checkpointing.parts import CheckpointReader, fill
from accelerate.checkpointing.shard_index import KeyPath, ShardIndex
from accelerate.checkpointing.state_layouts import (
    LAYOUTS,
    distribute,
    layouts_of,
    place_state,
    refuse_inner_dtensors,
)

UNNAMED = "unnamed"
"""Second key of the paths of states that belong to no parameter."""
MODEL, OPTIMIZER = "model", "optimizer"
"""First keys of the paths in states of models and optimizers."""


class ShardedState(Protocol):
    """State of an object in shards."""

    @property
    def root(self) -> str: ...  # MODEL or OPTIMIZER

    def state(self) -> dict[KeyPath, Any]:
        """Returns live tensors, local shards and other values by their paths."""

    def targets(self, index: ShardIndex, reader: CheckpointReader) -> dict[KeyPath, LocalShards | None]:
        """Returns the shards of all tensors that this rank reads, and None for other values."""

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        """Returns the change of the object to values that were read."""


@dataclass(frozen=True)
class ShardPlan:
    """Items that this rank reads from a folder of shards, and the object that loads them."""

    sharded: ShardedState
    index: ShardIndex
    targets: Mapping[KeyPath, LocalShards | None]
    items: Mapping[str, Sequence[Any]]  # by file


def plan_shards(folder: str, sharded: ShardedState, reader: CheckpointReader) -> ShardPlan:
    """Returns the items that this rank reads from a folder of shards."""
    from accelerate.checkpointing import shard_files  # imports DCP, which takes most of a second

    trusted = reader.load_kwargs.get("weights_only") is False
    index = shard_index.read(reader.folder / folder, sharded.root, trusted=trusted)
    index = replace(index, has_all_files=not reader.is_fast)
    targets = sharded.targets(index, reader)
    return ShardPlan(sharded, index, targets, shard_files.items_by_file(index, targets))


def read_shards(folder: str, sharded: ShardedState, reader: CheckpointReader) -> Change:
    """Reads the shards that this rank needs, and returns the change of the object."""
    from accelerate.checkpointing import shard_files  # imports DCP, which takes most of a second

    plan: ShardPlan = reader.plans.get(folder) or plan_shards(folder, sharded, reader)
    values = shard_files.read(plan.index, plan.targets, reader.load_kwargs, reader.map_file, plan.items)
    return plan.sharded.plan(values, reader)


@dataclass(frozen=True)
class ModuleShards:
    """Weights of a module without wrappers, with plain or distributed tensors."""

    module: nn.Module
    root: str = MODEL

    def state(self) -> dict[KeyPath, Any]:
        return {(MODEL, name): value for name, value in self.module.state_dict(keep_vars=True).items()}

    def targets(self, index: ShardIndex, reader: CheckpointReader) -> dict[KeyPath, LocalShards | None]:
        live = self.state()
        by_name = {str(path[1]): value for path, value in live.items()}
        stored = {str(path[1]): index.stored(path) for path in index.paths}
        check_weights(
            by_name, stored, index.folder, self.module, strict=reader.model_kwargs.get("strict", True)
        )
        return {path: target_of(stored[path[1]], value) for path, value in live.items() if path[1] in stored}

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        def apply() -> None:
            live = {str(path[1]): value for path, value in self.state().items()}
            weights = fill_weights(self.module, live, {str(path[1]): value for path, value in values.items()})
            state = {name: to_tensor(value, live.get(name)) for name, value in weights.items()}
            with reader.error_context(FSDP_MODEL_NAME, type(self.module).__name__):
                fill(self.module, state, reader.folder / FSDP_MODEL_NAME, reader.model_kwargs)

        return Change(apply, f"{type(self.module).__name__} ({FSDP_MODEL_NAME})", Stage.COLLECTIVE)


@dataclass(frozen=True)
class OptimizerShards:
    """State of an optimizer of plain or distributed tensors, by the names of its parameters.

    `owned` is empty, or has an entry for each parameter. True means that only this rank has its state, which
    is whole, False that another rank has it, and None that it is distributed like the parameter.
    """

    optimizer: Any
    names: Names
    owned: Sequence[bool | None] = ()
    root: str = OPTIMIZER

    def state(self) -> dict[KeyPath, Any]:
        whole = self.optimizer.state_dict()
        refuse_own_form(self.optimizer, whole)
        named = by_name(whole, self.names)
        unnamed = {key: named[STATE].pop(key) for key in whole[STATE] if isinstance(key, str)}
        states = {
            (OPTIMIZER, STATE, name, key): value
            for name, values in named[STATE].items()
            for key, value in values.items()
        }
        parameters = {own[0]: p for own, p in zip(chain(*self.names), self._parameters(), strict=False)}
        layouts = [
            (name, key, layout)
            for name, found in layouts_of(named[STATE], parameters).items()
            for key, layout in found.items()
        ]
        for key, value in unnamed.items():
            refuse_inner_dtensors(repr(key), {key: value})
        own, foreign = self._names_by_owner()
        common = {path: value for path, value in states.items() if path[2] not in own | foreign}
        whole = {path: _whole(value) for path, value in states.items() if path[2] in own}
        groups = group_paths(named[GROUPS], [group[PARAMETERS] for group in named[GROUPS]])
        common |= {(OPTIMIZER, LAYOUTS, name, key): layout for name, key, layout in layouts}
        common |= {(OPTIMIZER, UNNAMED, key, ""): value for key, value in unnamed.items()}
        return {**common, **groups, **whole}  # in the same order on all ranks, but for the last ones

    def _names_by_owner(self) -> tuple[set[str], set[str]]:
        """Returns the names of the parameters whose whole states are on this rank, and on other ranks."""
        parameters = [own for group in self.names for own in group]
        by_owner: dict[bool | None, set[str]] = {True: set(), False: set()}
        for own, is_owned in zip(parameters, self.owned, strict=False):
            by_owner.setdefault(is_owned, set()).update(own)
        return by_owner[True], by_owner[False]

    def targets(self, index: ShardIndex, reader: CheckpointReader) -> dict[KeyPath, LocalShards | None]:
        numbers, parameters = parameter_numbers(self.names), self._parameters()
        refuse_other_optimizer(index, numbers, len(self.names), self.optimizer)
        index = index.without(self._names_by_owner()[1])

        def like(path: KeyPath) -> Tensor | None:
            is_whole = path[1] != STATE or (OPTIMIZER, LAYOUTS, *path[2:]) in index.paths
            return None if is_whole else parameters[numbers[path[2]]]

        return {path: target_of(index.stored(path), like(path)) for path in index.paths}

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        numbers, parameters = parameter_numbers(self.names), self._parameters()
        states: dict[Any, Any] = {path[2]: to_tensor(values[path]) for path in values if path[1] == UNNAMED}
        placements: dict[tuple[int, str], Any] = {}
        for path, value in values.items():
            if path[1] != STATE:
                continue
            number, key = numbers[path[2]], path[3]
            states.setdefault(number, {})[key] = value
            layout, live = (
                values.get((OPTIMIZER, LAYOUTS, *path[2:])),
                live_state(self.optimizer, number, key),
            )
            chosen = place_state(f"{key!r} of {path[2]}", _on_meta(value), parameters[number], layout, live)
            if layout is not None or chosen != getattr(parameters[number], "placements", None):
                placements[number, key] = chosen
        groups = loaded_groups(self.optimizer, values, numbers)
        return optimizer_change(self.optimizer, states, groups, reader, parameters, placements)

    def _parameters(self) -> list[Tensor | None]:
        """Returns the parameters, or None for those whose states are not distributed like them."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if not self.owned:
            return parameters
        return [p if is_owned is None else None for p, is_owned in zip(parameters, self.owned, strict=True)]


def _whole(value: object) -> LocalShards | PlainValue:
    """Returns a value that is only on this rank, which saves and reads it."""
    if not isinstance(value, Tensor):
        return PlainValue(value, is_private=True)
    return replace(single_shard(value.detach()), is_private=True)


def by_name(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Returns a state dict of an optimizer with names of parameters in place of their numbers."""
    first = [own[0] for group in names for own in group]
    return {
        **{
            kind: {first[key] if isinstance(key, int) else key: values for key, values in state[kind].items()}
            for kind in (STATE, LAYOUTS)
            if kind in state
        },
        GROUPS: [
            {**group, PARAMETERS: [own[0] for own in parameters]}
            for group, parameters in zip(state[GROUPS], names, strict=False)
        ],
    }


def group_paths(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[KeyPath, Any]:
    """Returns the options of the groups of an optimizer by their paths."""
    return {
        (OPTIMIZER, GROUPS, index, key): list(own) if key == PARAMETERS else value
        for index, (group, own) in enumerate(zip(groups, names, strict=True))
        for key, value in group.items()
    }


def refuse_own_form(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raises for a state dict in a form of its own, in which shards are not found."""
    if not has_form(state):
        raise CheckpointError(
            f"{class_name(optimizer)} has a state dict in a form of its own, and not of 'state' and "
            "'param_groups' as torch.optim.Optimizer. A sharded run cannot save it: use another optimizer."
        )


def refuse_unnamed_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raises for a state dict with state that belongs to no parameter, which could not be loaded."""
    refuse_own_form(optimizer, state)
    unknown = [str(key) for key in state[STATE] if not isinstance(key, int)]
    if unknown:
        raise CheckpointError(
            f"{class_name(optimizer)} holds state that belongs to no parameter ({listed(unknown)}), which "
            "FSDP 1 cannot save. Keep it in param_groups or in the state of a parameter, use another "
            "optimizer, or set fsdp_version=2."
        )


def refuse_other_optimizer(
    index: ShardIndex, known: Container[str], groups: int, optimizer: torch.optim.Optimizer
) -> None:
    """Raises if a folder has other parameters or groups than an optimizer."""
    wrong = [path for path in index.paths if not _is_path_in_optimizer(path)]
    if wrong:
        raise CheckpointError(f"{index.folder} holds something else than an optimizer: {wrong[0]}.")
    index.check_files(index.paths.values())  # before memory is allocated for their content
    unknown = {str(path[2]) for path in index.paths if path[1] == STATE and path[2] not in known}
    if unknown:
        raise CheckpointError(
            f"{index.folder} does not fit this {class_name(optimizer)}: it does not step "
            f"{listed(sorted(unknown))}. Prepare the models and optimizers in the order in which they were "
            "saved."
        )
    saved = {path[2] for path in index.paths if path[1] == GROUPS}
    if saved != set(range(groups)):
        raise CheckpointError(
            f"{index.folder} holds {len(saved)} groups of parameters, and this {class_name(optimizer)} has "
            f"{groups}."
        )


def _is_path_in_optimizer(path: KeyPath) -> bool:
    kinds = {STATE: str, GROUPS: int, LAYOUTS: str, UNNAMED: str}
    return len(path) == 4 and path[1] in kinds and isinstance(path[2], kinds[path[1]])


def loaded_groups(
    optimizer: torch.optim.Optimizer, values: Mapping[KeyPath, Any], numbers: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns the groups of the optimizer's state dict with the options that were read.

    Args:
        values: All values that were read, by their paths.
        numbers: Number of each parameter by each of its names.
    """
    live = getattr(optimizer, "optimizer", optimizer).state_dict()[GROUPS]
    loaded: list[dict[str, Any]] = [{} for _ in live]
    for path, value in values.items():
        if path[1] == GROUPS:
            loaded[path[2]][path[3]] = to_tensor(value)
    for index, group in enumerate(loaded):
        parameters = group.pop(PARAMETERS, [])
        if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
            raise CheckpointError(f"Group {index} of the optimizer was saved without names of parameters.")
        saved: set[Any] = {numbers.get(name, name) for name in parameters}
        stepped = {number for number in numbers.values() if number in set(live[index][PARAMETERS])}
        if saved != stepped:
            names = [name for name, number in numbers.items() if number in stepped ^ saved]
            names += [name for name in saved if isinstance(name, str)]
            raise CheckpointError(
                f"Group {index} of the optimizer was saved with other parameters: {listed(names)}."
            )
        group.pop("param_names", None)
    return [{**before, **after} for before, after in zip(live, loaded, strict=True)]


def optimizer_change(
    optimizer: torch.optim.Optimizer,
    states: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    reader: CheckpointReader,
    like: Sequence[Tensor | None] | None = None,
    placements: Mapping[tuple[int, str], Any] | None = None,
) -> Change:
    """Returns the change of an optimizer to states, by the numbers of its parameters, and groups.

    Tensors are copied into those that the optimizer has, if these have the same layout.

    Args:
        states: States by the numbers of parameters, and states that belong to no parameter by their keys.
        groups: Groups of its state dict.
        like: Parameters, or None for those whose states are not distributed like them.
        placements: Placements of the states that are distributed otherwise, by number and key of the state,
            None for a plain one.
    """
    kind = class_name(optimizer)
    without_values = {
        number: {key: _on_meta(value) for key, value in values.items()}
        if isinstance(values, dict)
        else values
        for number, values in states.items()
    }
    with reader.error_context(OPTIMIZER, kind):
        check_optimizer(optimizer, {STATE: without_values, GROUPS: list(groups)})

    def apply() -> None:
        live = (parameter for group in optimizer.param_groups for parameter in group["params"])
        parameters = dict(enumerate(live))
        targets = parameters if like is None else dict(enumerate(like))
        is_mapped = reader.map_file is not None
        for (number, key), chosen in (placements or {}).items():
            value = to_tensor(states[number][key])
            if chosen is not None:
                value = distribute(value.clone() if is_mapped else value, parameters[number], chosen)
            states[number][key] = value
        filled = fill_states(optimizer, states, parameters, targets, is_mapped=is_mapped)
        with reader.error_context(OPTIMIZER, kind):
            optimizer.load_state_dict({STATE: filled, GROUPS: list(groups)})

    return Change(apply, f"{kind} ({OPTIMIZER})")


def _on_meta(value: torch.Tensor | LocalShards) -> Any:
    """Returns a tensor with the shape and dtype of local shards, or any other value unchanged."""
    is_tensor = isinstance(value, LocalShards)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_tensor else value
