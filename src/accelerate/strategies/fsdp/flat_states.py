"""States of models and optimizers under FSDP 1: whole, or the elements in each rank's flat parameters.

torch's own sharded state dicts gather each unit over the process group; here no process talks to another. A
range of elements is cut into boxes of the whole tensor, so that any other layout can read it. Files of whole
states are those of every other layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    StateDictType,
)

from accelerate import checkpointing, torch_private
from accelerate.base import ConfigurationError
from accelerate.checkpointing import GROUPS, MODEL, OPTIMIZER, STATE, Change, KeyPath, Load, LocalShards
from accelerate.strategies.fsdp.parameters import clean_name
from accelerate.strategies.fsdp.strategies import GatheredOptimizer
from accelerate.weights import is_extra

Names = Sequence[Sequence[str]]
"""For each group of an optimizer the names of its parameters, in the order that they had."""


@contextmanager
def whole_states(root: FSDP, offload: bool, first_only: bool = False) -> Iterator[None]:
    """Let the states of a model and of its optimizers be whole inside the block, maybe on rank 0 only.

    They may come to the CPU; on a CPU torch crashes when there is nothing to offload.
    """
    options = {"offload_to_cpu": offload, "rank0_only": first_only}
    with warnings.catch_warnings():
        # what torch recommends instead leaves a state on one rank of all machines
        warnings.filterwarnings("ignore", r"FSDP\.state_dict_type", FutureWarning)
        torchs_own = ("When using ``NO_SHARD``", "`_get_pg_default_device` will be", "Multiple backends are")
        for text in torchs_own:
            warnings.filterwarnings("ignore", text, UserWarning)
        of_models, of_optimizers = FullStateDictConfig(**options), FullOptimStateDictConfig(**options)
        with FSDP.state_dict_type(root, StateDictType.FULL_STATE_DICT, of_models, of_optimizers):
            yield


@dataclass(eq=False)
class WholeFlatOptimizer(GatheredOptimizer):
    """Saves and loads an optimizer that steps the flat parameters of one model."""

    root: FSDP
    names: Names
    offload: bool
    needs_all_ranks: ClassVar[bool] = True

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Verifies the shapes of a whole state, because torch shards a tensor of any shape."""
        flat = [name for group in self.names for name in group]
        shapes = whole_shapes(self.root)
        for index, values in state["state"].items():
            shape = tuple(shapes[flat[index]].shape)
            checkpointing.check_shapes(f"The state of {flat[index]}", values, shape)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads this rank's part of a whole state. Called on all ranks."""
        flat = [name for group in self.names for name in group]
        named = {
            "state": {flat[index]: dict(values) for index, values in state["state"].items()},
            "param_groups": [
                {**group, "params": list(names)}
                for group, names in zip(state["param_groups"], self.names, strict=True)
            ],
        }
        with whole_states(self.root, self.offload):
            own = FSDP.optim_state_dict_to_load(self.root, self.optimizer.optimizer, named)
        self.optimizer.load_state_dict(own)


def gather_flat_state(optimizer: Any, root: FSDP, names: Names, offload: bool, keep: bool) -> dict[str, Any]:
    """Return the whole state of an optimizer in its order of parameters, empty unless kept; on all ranks."""
    with whole_states(root, offload):
        named = FSDP.optim_state_dict(root, optimizer.optimizer)
    numbers = count()
    groups = [
        {**group, "params": [next(numbers) for _ in members]}
        for group, members in zip(named["param_groups"], names, strict=True)
    ]
    states = {
        index: {  # torch gives all parameters of a unit one tensor with the count of steps
            key: value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value
            for key, value in named["state"][name].items()
        }
        for index, name in enumerate(name for group in names for name in group)
        if name in named["state"]
    }
    return {"state": states if keep else {}, "param_groups": groups}


@dataclass(frozen=True)
class LocalRange:
    """The elements of one parameter that are on this rank."""

    names: tuple[str, ...]  # all names of the parameter, without wrappers; the usual one first
    shape: checkpointing.Shape
    start: int  # number of its first element on this rank
    values: Tensor
    stepped: Tensor  # what an optimizer steps: the parameter itself, or the flat one that it is a part of
    total: int  # elements of `stepped` on this rank
    at: int  # where those of the parameter begin in them
    copies: tuple[int, int]  # number of processes with the same elements, and of this one among them

    def to_shards(self, values: Tensor, turn: int) -> LocalShards:
        """Return elements as local shards of the parameter; processes that have them save them by turns."""
        shards = checkpointing.shards_of_range(values, self.shape, self.start)
        return LocalShards(self.shape, values.dtype, shards, self.owns(turn))

    def owns(self, turn: int) -> bool:
        """Whether this process saves its elements."""
        num_copies, number = self.copies
        return number == turn % num_copies

    def narrow(self, flat: Tensor) -> Tensor:
        """Return what belongs to the parameter of a tensor with one element for each of `stepped`."""
        return flat.view(-1).narrow(0, self.at, self.values.numel())


def local_ranges(root: nn.Module) -> Iterator[LocalRange]:
    """Iterate over the local ranges of all parameters in units, also of those without an element here."""
    for prefix, unit in torch_private.flat_units(root):
        unit.reshard()
        shard, own, all_names = unit.shard, unit.originals, _names_in(unit, prefix)
        strided = [
            names[0] for names, is_dense in zip(all_names, unit.are_contiguous, strict=True) if not is_dense
        ]
        if strided:
            raise ConfigurationError(
                f"{strided[0]} is not contiguous in memory (channels_last?), and FSDP 1 cannot save it in "
                "shards. Save whole states: FSDP_STATE_DICT_TYPE=FULL_STATE_DICT; or set fsdp_version=2."
            )
        for index, names in enumerate(all_names):
            start, at, size = unit.local_range(index)
            values, shape = shard.narrow(0, at, size), tuple(unit.shapes[index])
            stepped, total, at = (unit.flat, shard.numel(), at) if own is None else (own[index], size, 0)
            yield LocalRange(names, shape, start, values, stepped, total, at, unit.replicas)


def _names_in(unit: torch_private.FlatUnit, prefix: str) -> list[tuple[str, ...]]:
    """Return the names of each parameter in a unit, several for a tied one."""
    prefix = f"{prefix}." if prefix else ""
    names = {name: [name] for name in (clean_name(prefix + name) for name in unit.names)}
    for tied in unit.tied:
        first, alias = (clean_name(f"{prefix}{name}".replace("..", ".")) for name in tied)
        names[first].append(alias)
    return [tuple(group) for group in names.values()]


def _outside_units(root: nn.Module, known: set[str]) -> Iterator[tuple[str, Any]]:
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
        if _has_extra_state(module):
            yield full("_extra_state"), module.get_extra_state()


def whole_shapes(root: FSDP) -> dict[str, Any]:
    """Return what whole weights of a model have by name, without values; in any order of memory."""
    shapes: dict[str, Any] = {}
    for prefix, unit in torch_private.flat_units(root):
        for names, shape in zip(_names_in(unit, prefix), unit.shapes, strict=True):
            shapes.update(dict.fromkeys(names, torch.empty(shape, dtype=unit.flat.dtype, device="meta")))
    return {**shapes, **dict(_outside_units(root, set(shapes)))}


class FlatModuleShards(checkpointing.ModuleShards):
    """The weights of a model under FSDP 1, whose outermost unit is `module`."""

    def state(self) -> dict[KeyPath, Any]:
        state: dict[str, Any] = {}
        for turn, local in enumerate(local_ranges(self.module)):
            state.update(dict.fromkeys(local.names, local.to_shards(local.values, turn)))
        state.update(_outside_units(self.module, set(state)))
        return {(MODEL, name): value for name, value in state.items()}

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        return Change(
            partial(self._load, values), f"{MODEL} under FSDP 1", stage=checkpointing.Stage.COLLECTIVE
        )

    @torch.no_grad()
    def _load(self, values: Mapping[KeyPath, Any]) -> None:
        current = self.state()
        for key, value in values.items():
            if is_extra(key[1]):
                _owner_of(self.module, key[1]).set_extra_state(checkpointing.rejoin(value))
                continue
            own = current[key]
            shards = own.shards if isinstance(own, LocalShards) else checkpointing.whole(own).shards
            for target, read in zip(shards, value.shards, strict=True):
                target.tensor.copy_(read.tensor.view_as(target.tensor))


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _owner_of(root: nn.Module, name: str) -> Any:
    """Return the module that has an extra state, also under wrappers."""
    path = name.rpartition(".")[0]
    return next(m for prefix, m in root.named_modules() if clean_name(prefix) == path and _has_extra_state(m))


@dataclass(frozen=True)
class FlatOptimizerShards:
    """The state of an optimizer of one model under FSDP 1."""

    optimizer: Any
    module: FSDP
    names: Sequence[Sequence[str]]
    root: str = OPTIMIZER
    _read: dict[Any, Tensor] = field(default_factory=dict)

    def state(self) -> dict[KeyPath, Any]:
        saved = self.optimizer.state_dict()
        numbers = self._numbers()
        state: dict[KeyPath, Any] = {}
        for turn, local in enumerate(local_ranges(self.module)):
            values = saved[STATE].get(numbers.get(id(local.stepped)), {})
            if local.values.numel():
                for key, value in values.items():
                    state[OPTIMIZER, STATE, local.names[0], key] = _state_of(local, value, turn)
        return {**state, **checkpointing.group_paths(saved[GROUPS], self.names)}

    def targets(self, index: checkpointing.ShardIndex, options: Load) -> dict[KeyPath, LocalShards | None]:
        ranges = self._by_name()
        checkpointing.refuse_other_optimizer(index, ranges, len(self.names), self.optimizer)
        return {
            key: self._target(key, ranges.get(key[2]) if key[1] == STATE else None, index.stored(key))
            for key in index.paths
            if key[1] != STATE or ranges[key[2]].total
        }

    def _target(self, key: KeyPath, local: LocalRange | None, stored: Tensor | None) -> LocalShards | None:
        if stored is None or local is None or local.shape != tuple(stored.shape) or key[3] == "step":
            return checkpointing.memory_for(stored)
        flat = (id(local.stepped), key[3])
        if flat not in self._read:
            self._read[flat] = torch.zeros(local.total, dtype=stored.dtype)
        return local.to_shards(local.narrow(self._read[flat]), 0)

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        ranges, by_identity = self._by_name(), self._numbers()
        numbers = {name: by_identity[id(local.stepped)] for name, local in ranges.items()}
        states: dict[int, dict[str, Any]] = {}
        for key, value in values.items():
            if key[1] == STATE:
                flat = self._read.get((id(ranges[key[2]].stepped), key[3]))
                own = states.setdefault(numbers[key[2]], {})
                own[key[3]] = checkpointing.rejoin(value) if flat is None else flat
        groups = checkpointing.loaded_groups(self.optimizer, values, numbers)
        return checkpointing.optimizer_change(self.optimizer, states, groups, options)

    def _numbers(self) -> dict[int, int]:
        """Return the numbers of what the optimizer steps, by identity."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {id(parameter): index for index, parameter in enumerate(stepped)}

    def _by_name(self) -> dict[str, LocalRange]:
        stepped = self._numbers()
        ranges = [local for local in local_ranges(self.module) if id(local.stepped) in stepped]
        return {name: local for local in ranges for name in local.names}


def _state_of(local: LocalRange, value: Any, turn: int) -> LocalShards | checkpointing.Value:
    """Return what is saved of a value that an optimizer keeps for a parameter."""
    first = local.start == 0 and local.owns(turn)
    if not isinstance(value, Tensor):
        return checkpointing.Value(value, first)
    if value.ndim and value.numel() == local.total:
        return local.to_shards(local.narrow(value.detach()), turn)
    return checkpointing.whole(value.detach(), first)
