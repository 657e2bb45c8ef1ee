"""Sharded state dicts under FSDP 1: each process saves the elements in its own flat parameters.

torch's own sharded state dicts gather each unit over the process group; here no process talks to another. A
range of elements is cut into boxes of the whole tensor, so that any other layout can read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from accelerate import torch_private
from accelerate.base import ConfigurationError
from accelerate.checkpointing import (
    GROUPS,
    MODEL,
    OPTIMIZER,
    STATE,
    Change,
    Load,
    LocalShards,
    Place,
    Shape,
    ShardIndex,
    Stage,
    Value,
    group_places,
    loaded_groups,
    memory_for,
    model_targets,
    optimizer_change,
    refuse_other_optimizer,
    rejoin,
    shards_of_range,
    whole,
)
from accelerate.strategies.fsdp.parameters import clean_name
from accelerate.weights import is_extra


@dataclass(frozen=True)
class LocalRange:
    """The elements of one parameter that are on this rank.

    Attributes:
        names: all names of the parameter, without wrappers; the usual one first.
        start: number of its first element on this rank.
        stepped: what an optimizer steps: the parameter itself, or the flat one that it is a part of.
        total: elements of `stepped` on this rank.
        at: where those of the parameter begin in them.
        copies: processes that have the same elements, and the place of this one among them.
    """

    names: tuple[str, ...]
    shape: Shape
    start: int
    values: Tensor
    stepped: Tensor
    total: int
    at: int
    copies: tuple[int, int]

    def spread(self, values: Tensor, turn: int) -> LocalShards:
        """Return elements as the local shards of a tensor with the shape of the parameter.

        Args:
            turn: counts the parameters, so that processes with the same elements share the work.
        """
        shards = shards_of_range(values, self.shape, self.start)
        return LocalShards(self.shape, values.dtype, shards, self.owns(turn))

    def owns(self, turn: int) -> bool:
        """Whether this process saves its elements."""
        count, place = self.copies
        return place == turn % count

    def part(self, flat: Tensor) -> Tensor:
        """Return what belongs to the parameter of a tensor with one element for each of `stepped`."""
        return flat.view(-1).narrow(0, self.at, self.values.numel())


def local_ranges(root: FSDP) -> list[LocalRange]:
    """Return the local range of all parameters in units, also of those without an element here."""
    ranges: list[LocalRange] = []
    for prefix, unit in torch_private.flat_units(root):
        unit.reshard()
        ranges += _ranges_of(unit, f"{prefix}." if prefix else "")
    return ranges


def _ranges_of(unit: torch_private.FlatUnit, prefix: str) -> Iterator[LocalRange]:
    aliases, shard, own = _aliases(unit, prefix), unit.shard, unit.originals
    for index, (fqn, shape) in enumerate(zip(unit.names, unit.shapes, strict=True)):
        name = clean_name(prefix + fqn)
        if not unit.are_contiguous[index]:
            raise ConfigurationError(
                f"{name} is not contiguous in memory (channels_last?), and FSDP 1 cannot save it in "
                "shards. Save whole states: FSDP_STATE_DICT_TYPE=FULL_STATE_DICT; or set fsdp_version=2."
            )
        start, at, count = unit.local_range(index)
        yield LocalRange(
            (name, *aliases.get(name, ())),
            tuple(shape),
            start,
            shard.narrow(0, at, count),
            unit.flat if own is None else own[index],
            shard.numel() if own is None else count,
            at if own is None else 0,
            unit.replicas,
        )


def _aliases(unit: torch_private.FlatUnit, prefix: str) -> dict[str, list[str]]:
    """Return the further names of tied parameters."""
    aliases: dict[str, list[str]] = {}
    for first, further in unit.tied:
        first, further = (clean_name(f"{prefix}{name}".replace("..", ".")) for name in (first, further))
        aliases.setdefault(first, []).append(further)
    return aliases


def _others(root: FSDP, known: set[str]) -> Iterator[tuple[str, Any]]:
    """Iterate over what a model saves and no unit holds: buffers, ignored parameters, extra state."""
    for prefix, module in root.named_modules():

        def full(name: str, prefix: str = prefix) -> str:
            return clean_name(f"{prefix}.{name}" if prefix else name)

        for name, parameter in module._parameters.items():
            if parameter is not None and name != torch_private.FLAT_PARAMETER and full(name) not in known:
                yield full(name), parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in torch_private.non_persistent_buffers(module):
                yield full(name), buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield full("_extra_state"), module.get_extra_state()


def whole_shapes(root: FSDP) -> dict[str, Any]:
    """Return what whole weights of a model have by name, without values; in any order of memory."""
    shapes: dict[str, Any] = {}
    for prefix, unit in torch_private.flat_units(root):
        path = f"{prefix}." if prefix else ""
        aliases = _aliases(unit, path)
        for fqn, shape in zip(unit.names, unit.shapes, strict=True):
            name = clean_name(path + fqn)
            empty = torch.empty(shape, dtype=unit.flat.dtype, device="meta")
            shapes.update(dict.fromkeys((name, *aliases.get(name, ())), empty))
    return {**shapes, **dict(_others(root, set(shapes)))}


@dataclass(frozen=True)
class FlatModuleShards:
    """The weights of a model under FSDP 1."""

    module: FSDP
    root: str = MODEL

    def state(self) -> dict[Place, Any]:
        spreads = [
            (local, local.spread(local.values, turn)) for turn, local in enumerate(local_ranges(self.module))
        ]
        state: dict[Place, Any] = {(MODEL, name): own for local, own in spreads for name in local.names}
        others = _others(self.module, {place[1] for place in state})
        return {**state, **{(MODEL, name): value for name, value in others}}

    def targets(self, index: ShardIndex, options: Load) -> dict[Place, LocalShards | None]:
        return model_targets(self.module, self.state(), index, options)

    def plan(self, values: Mapping[Place, Any], options: Load) -> Change:
        return Change(partial(self._apply, values), f"{MODEL} under FSDP 1", stage=Stage.LAST)

    @torch.no_grad()
    def _apply(self, values: Mapping[Place, Any]) -> None:
        live = self.state()
        for place, value in values.items():
            own = live[place]
            if is_extra(place[1]):
                module = self.module.get_submodule(_owner_of(self.module, place[1]))
                module.set_extra_state(rejoin(value))
                continue
            shards = own.shards if isinstance(own, LocalShards) else whole(own).shards
            for target, read in zip(shards, value.shards, strict=True):
                target.tensor.copy_(read.tensor.view_as(target.tensor))


def _owner_of(root: nn.Module, name: str) -> str:
    """Return the path, with wrappers, of the module that has an extra state."""
    wanted = name.rpartition(".")[0]
    owner: str = next(
        path
        for path, module in root.named_modules()
        if clean_name(path) == wanted and type(module).get_extra_state is not nn.Module.get_extra_state
    )
    return owner


@dataclass(frozen=True)
class FlatOptimizerShards:
    """The state of an optimizer of one model under FSDP 1."""

    optimizer: Any
    module: FSDP
    names: Sequence[Sequence[str]]
    root: str = OPTIMIZER
    _read: dict[Any, Tensor] = field(default_factory=dict)

    def state(self) -> dict[Place, Any]:
        saved = self.optimizer.state_dict()
        places = self._places()
        state: dict[Place, Any] = {}
        for turn, local in enumerate(local_ranges(self.module)):
            values = saved[STATE].get(places.get(id(local.stepped)), {})
            if local.values.numel():
                for key, value in values.items():
                    state[OPTIMIZER, STATE, local.names[0], key] = _state_of(local, value, turn)
        return {**state, **group_places(saved[GROUPS], self.names)}

    def targets(self, index: ShardIndex, options: Load) -> dict[Place, LocalShards | None]:
        known = self._by_name()
        refuse_other_optimizer(index, known, len(self.names), self.optimizer)
        wanted = [place for place in index.places if place[1] != STATE or known[place[2]].total]
        return {place: self._target(place, known, index.stored(place)) for place in wanted}

    def _target(
        self, place: Place, known: Mapping[str, LocalRange], stored: Tensor | None
    ) -> LocalShards | None:
        local = known[place[2]] if place[1] == STATE else None
        if stored is None or local is None or local.shape != tuple(stored.shape) or place[3] == "step":
            return memory_for(stored)
        key = (id(local.stepped), place[3])
        if key not in self._read:
            self._read[key] = torch.zeros(local.total, dtype=stored.dtype)
        return local.spread(local.part(self._read[key]), 0)

    def plan(self, values: Mapping[Place, Any], options: Load) -> Change:
        known, places = self._by_name(), self._places()
        states: dict[int, dict[str, Any]] = {}
        for place, value in values.items():
            if place[1] != STATE:
                continue
            local = known[place[2]]
            filled = self._read.get((id(local.stepped), place[3]))
            states.setdefault(places[id(local.stepped)], {})[place[3]] = (
                rejoin(value) if filled is None else filled
            )
        numbers = {name: places[id(local.stepped)] for name, local in known.items()}
        groups = loaded_groups(self.optimizer, values, numbers)
        return optimizer_change(self.optimizer, states, groups, options)

    def _places(self) -> dict[int, int]:
        """Return what the optimizer steps, by identity, with its number."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {id(parameter): index for index, parameter in enumerate(stepped)}

    def _by_name(self) -> dict[str, LocalRange]:
        stepped = self._places()
        own = [local for local in local_ranges(self.module) if id(local.stepped) in stepped]
        return {name: local for local in own for name in local.names}


def _state_of(local: LocalRange, value: Any, turn: int) -> LocalShards | Value:
    """Return what is saved of a value that an optimizer keeps for a parameter."""
    first = local.start == 0 and local.owns(turn)
    if not isinstance(value, Tensor):
        return Value(value, first)
    if value.ndim and value.numel() == local.total:
        return local.spread(local.part(value.detach()), turn)
    return whole(value.detach(), first)
