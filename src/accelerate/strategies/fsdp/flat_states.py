"""Full and sharded states of models and optimizers under FSDP 1.

A sharded state has the elements of the flat parameters on this rank. The sharded state dicts of torch gather
each unit with collectives, but here no rank communicates. A range of elements is split into boxes of the
whole tensor, so that any other layout can load it. `Fsdp1` in `v1.py` returns these classes.
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
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import (
    GROUPS,
    MODEL,
    OPTIMIZER,
    STATE,
    Change,
    CheckpointReader,
    KeyPath,
    LocalShards,
)
from accelerate.nested import iterate_tensors
from accelerate.ops import run_on_all_ranks
from accelerate.strategies.dtensors import clean_name
from accelerate.strategies.state import GatheredOptimizer
from accelerate.weights import is_extra

Names = Sequence[Sequence[str]]
"""Names of the parameters in each group of an optimizer, in their original order."""


@contextmanager
def full_state_dicts(root: FSDP, offload: bool, first_only: bool = False) -> Iterator[None]:
    """Sets full state dicts for a model and its optimizers inside the block.

    Args:
        offload: Whether they are moved to the CPU, which fails in torch if they are there already.
        first_only: Whether only rank 0 gets them.
    """
    options = {"offload_to_cpu": offload, "rank0_only": first_only}
    with warnings.catch_warnings():
        # the API that torch recommends returns a full state on rank 0 of all nodes only
        warnings.filterwarnings("ignore", r"FSDP\.state_dict_type", FutureWarning)
        texts = ("When using ``NO_SHARD``", "`_get_pg_default_device` will be", "Multiple backends are")
        for text in texts:
            warnings.filterwarnings("ignore", text, UserWarning)
        model_config, optimizer_config = FullStateDictConfig(**options), FullOptimStateDictConfig(**options)
        with FSDP.state_dict_type(root, StateDictType.FULL_STATE_DICT, model_config, optimizer_config):
            yield


@dataclass(eq=False)
class WholeFlatOptimizer(GatheredOptimizer):
    """Full state of an optimizer that steps the flat parameters of one model."""

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
        """Loads the part of a full state that is on this rank, on all ranks."""
        flat = [name for group in self.names for name in group]
        named = {
            "state": {flat[index]: dict(values) for index, values in state["state"].items()},
            "param_groups": [
                {**group, "params": list(names)}
                for group, names in zip(state["param_groups"], self.names, strict=True)
            ],
        }
        with full_state_dicts(self.root, self.offload):
            own = FSDP.optim_state_dict_to_load(self.root, self.optimizer.optimizer, named)
        self.optimizer.load_state_dict(own)


def check_flat_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raises if states on this rank are not those of elements of parameters."""
    checkpointing.refuse_unnamed_state(optimizer, state)
    sizes = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    for number, values in state[STATE].items():
        for key, value in values.items():
            tensors = list(iterate_tensors(value))
            fits = all(tensor.numel() in (1, sizes[number]) for tensor in tensors)
            if not fits or (tensors and not isinstance(value, Tensor)):
                raise CheckpointError(
                    f"The state {key!r} of {checkpointing.class_name(optimizer)} is not element-wise: it is "
                    "that of parts of flat parameters, which FSDP 1 cannot save. Set fsdp_version=2, or use "
                    "an element-wise optimizer such as AdamW."
                )


def gather_flat_state(optimizer: Any, root: FSDP, names: Names, offload: bool, keep: bool) -> dict[str, Any]:
    """Returns the full state of an optimizer by numbers of parameters, or an empty one unless `keep`.

    Called on all ranks.
    """
    run_on_all_ranks(lambda: check_flat_state(optimizer, optimizer.optimizer.state_dict()))
    with full_state_dicts(root, offload):
        named = FSDP.optim_state_dict(root, optimizer.optimizer)
    numbers = count()
    groups = [
        {**group, "params": [next(numbers) for _ in members]}
        for group, members in zip(named["param_groups"], names, strict=True)
    ]
    states = {
        index: {  # all parameters of a unit share the tensor of the step in torch
            key: value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value
            for key, value in named["state"][name].items()
        }
        for index, name in enumerate(name for group in names for name in group)
        if name in named["state"]
    }
    return {"state": states if keep else {}, "param_groups": groups}


@dataclass(frozen=True)
class LocalRange:
    """Elements of one parameter that are on this rank."""

    names: tuple[str, ...]  # all names of the parameter without wrappers, the usual one first
    shape: checkpointing.Shape
    start: int  # number of its first element on this rank
    values: Tensor
    stepped: Tensor  # tensor that an optimizer steps, the parameter itself or the flat parameter
    total: int  # elements of `stepped` on this rank
    at: int  # position of the parameter in them
    replicas: tuple[int, int]  # number of ranks with the same elements, and index of this rank among them
    group: Any  # process group of the ranks that have all elements together, or None if this rank has them

    def to_shards(self, values: Tensor, position: int) -> LocalShards:
        """Returns elements as local shards of the parameter, which the replicas take turns in saving."""
        shards = checkpointing.shards_of_range(values, self.shape, self.start)
        return LocalShards(self.shape, values.dtype, shards, self.owns(position))

    def owns(self, position: int) -> bool:
        """Returns whether this rank saves its elements."""
        num_replicas, index = self.replicas
        return index == position % num_replicas

    def narrow(self, flat: Tensor) -> Tensor:
        """Returns the elements of the parameter in a tensor of the size of `stepped`."""
        return flat.view(-1).narrow(0, self.at, self.values.numel())


def local_ranges(root: nn.Module) -> Iterator[LocalRange]:
    """Iterates over the local ranges of all parameters in units, including empty ranges."""
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
            group = unit.group if unit.is_sharded else None
            yield LocalRange(names, shape, start, values, stepped, total, at, unit.replicas, group)


def _names_in(unit: torch_private.FlatUnit, prefix: str) -> list[tuple[str, ...]]:
    """Returns the names of each parameter in a unit, several for a tied parameter."""
    prefix = f"{prefix}." if prefix else ""
    names = {name: [name] for name in (clean_name(prefix + name) for name in unit.names)}
    for tied in unit.tied:
        first, alias = (clean_name(f"{prefix}{name}".replace("..", ".")) for name in tied)
        names[first].append(alias)
    return [tuple(group) for group in names.values()]


def outside_units(root: nn.Module, known: set[str]) -> Iterator[tuple[str, Any]]:
    """Iterates over buffers, ignored parameters and extra state, which no unit shards."""
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
    """Returns tensors with the names, shapes and dtypes of the full weights, without values."""
    shapes: dict[str, Any] = {}
    for prefix, unit in torch_private.flat_units(root):
        for names, shape in zip(_names_in(unit, prefix), unit.shapes, strict=True):
            shapes.update(dict.fromkeys(names, torch.empty(shape, dtype=unit.flat.dtype, device="meta")))
    return {**shapes, **dict(outside_units(root, set(shapes)))}


class FlatModuleShards(checkpointing.ModuleShards):
    """Weights of a model under FSDP 1, whose outermost unit is `module`."""

    def state(self) -> dict[KeyPath, Any]:
        state: dict[str, Any] = {}
        for position, local in enumerate(local_ranges(self.module)):
            state.update(dict.fromkeys(local.names, local.to_shards(local.values, position)))
        state.update(outside_units(self.module, set(state)))
        return {(MODEL, name): value for name, value in state.items()}

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        return Change(
            partial(self._load, values), f"{MODEL} under FSDP 1", stage=checkpointing.Stage.COLLECTIVE
        )

    @torch.no_grad()
    def _load(self, values: Mapping[KeyPath, Any]) -> None:
        current = self.state()
        for key, value in values.items():
            if is_extra(key[1]):
                _owner_of(self.module, key[1]).set_extra_state(checkpointing.to_tensor(value))
                continue
            own = current[key]
            shards = own.shards if isinstance(own, LocalShards) else checkpointing.single_shard(own).shards
            for target, read in zip(shards, value.shards, strict=True):
                target.tensor.copy_(read.tensor.view_as(target.tensor))


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _owner_of(root: nn.Module, name: str) -> Any:
    """Returns the module with an extra state, also under wrappers."""
    path = name.rpartition(".")[0]
    return next(m for prefix, m in root.named_modules() if clean_name(prefix) == path and _has_extra_state(m))


@dataclass(frozen=True)
class FlatOptimizerShards:
    """State of an optimizer of one model under FSDP 1."""

    optimizer: Any
    module: FSDP
    names: Sequence[Sequence[str]]
    root: str = OPTIMIZER
    _read: dict[Any, Tensor] = field(default_factory=dict)

    def state(self) -> dict[KeyPath, Any]:
        saved = self.optimizer.state_dict()
        check_flat_state(self.optimizer, saved)
        numbers = self._numbers()
        state: dict[KeyPath, Any] = {}
        for position, local in enumerate(local_ranges(self.module)):
            values = saved[STATE].get(numbers.get(id(local.stepped)), {})
            if local.values.numel():
                for key, value in values.items():
                    state[OPTIMIZER, STATE, local.names[0], key] = _to_saved(local, value, position)
        return {**state, **checkpointing.group_paths(saved[GROUPS], self.names)}

    def targets(
        self, index: checkpointing.ShardIndex, reader: CheckpointReader
    ) -> dict[KeyPath, LocalShards | None]:
        ranges = self._by_name()
        checkpointing.refuse_other_optimizer(index, ranges, len(self.names), self.optimizer)
        return {
            key: self._target(key, ranges.get(key[2]) if key[1] == STATE else None, index.stored(key))
            for key in index.paths
            if key[1] != STATE or ranges[key[2]].total
        }

    def _target(self, key: KeyPath, local: LocalRange | None, stored: Tensor | None) -> LocalShards | None:
        if stored is None or local is None or local.shape != tuple(stored.shape) or key[3] == "step":
            return checkpointing.target_of(stored)
        flat = (id(local.stepped), key[3])
        if flat not in self._read:
            self._read[flat] = torch.zeros(local.total, dtype=stored.dtype)
        return local.to_shards(local.narrow(self._read[flat]), 0)

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        ranges, by_identity = self._by_name(), self._numbers()
        numbers = {name: by_identity[id(local.stepped)] for name, local in ranges.items()}
        states: dict[int, dict[str, Any]] = {}
        for key, value in values.items():
            if key[1] == STATE:
                flat = self._read.get((id(ranges[key[2]].stepped), key[3]))
                own = states.setdefault(numbers[key[2]], {})
                own[key[3]] = checkpointing.to_tensor(value) if flat is None else flat
        groups = checkpointing.loaded_groups(self.optimizer, values, numbers)
        return checkpointing.optimizer_change(self.optimizer, states, groups, reader)

    def _numbers(self) -> dict[int, int]:
        """Returns the numbers of the tensors that the optimizer steps, by identity."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {id(parameter): index for index, parameter in enumerate(stepped)}

    def _by_name(self) -> dict[str, LocalRange]:
        stepped = self._numbers()
        ranges = [local for local in local_ranges(self.module) if id(local.stepped) in stepped]
        return {name: local for local in ranges for name in local.names}


def _to_saved(local: LocalRange, value: object, position: int) -> LocalShards | checkpointing.PlainValue:
    """Returns the part of a value of an optimizer's state that this rank saves."""
    first = local.start == 0 and local.owns(position)
    if not isinstance(value, Tensor):
        return checkpointing.PlainValue(value, first)
    if value.ndim and value.numel() == local.total:
        return local.to_shards(local.narrow(value.detach()), position)
    return checkpointing.single_shard(value.detach(), first)
