"""Sharded models and optimizers, by the names of parameters: each process saves and reads its own shards.

The local shards of a tensor are, for each, its values and its offsets in the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from accelerate.base import FSDP_MODEL_NAME, OPTIMIZER_NAME, CheckpointError, listed
from accelerate.checkpointing import shard_index
from accelerate.checkpointing.changes import Change, Stage
from accelerate.checkpointing.compatibility import (
    GROUPS,
    PARAMETERS,
    STATE,
    Names,
    check_optimizer,
    check_weights,
    parameter_numbers,
)
from accelerate.checkpointing.parts import Load, Part, Payload, fill
from accelerate.checkpointing.shard_index import KeyPath, ShardIndex
from accelerate.ops import is_dtensor

if TYPE_CHECKING:  # they take half a second to import
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor

MODEL = "model"
OPTIMIZER = "optimizer"
FOLDERS = {MODEL: FSDP_MODEL_NAME, OPTIMIZER: OPTIMIZER_NAME}

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # where a box begins in the whole tensor, and its sizes


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, and where it begins in the whole tensor."""

    offsets: Shape
    tensor: Tensor


@dataclass(frozen=True)
class LocalShards:
    """What this process has of one tensor; DCP's planners take it by the protocol that DTensor has."""

    shape: Shape  # of the whole tensor
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    owned: bool = True  # this process saves them; where several have the same ones, one of them does

    def emptied(self, dtype: torch.dtype | None = None) -> LocalShards:
        """Return the same boxes with memory of their own, on the CPU and without values."""
        kind = self.dtype if dtype is None else dtype
        shards = tuple(
            Shard(shard.offsets, torch.empty(shard.tensor.shape, dtype=kind, device="cpu"))
            for shard in self.shards
        )
        return LocalShards(self.shape, kind, shards, self.owned)

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        return [
            write_item(key, self.shape, self.dtype, shard.offsets, shard.tensor.shape)
            for shard in self.shards
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.shape)
            for shard in self.shards
            if shard.tensor.numel()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(shard.tensor for shard in self.shards if shard.offsets == tuple(index.offset or ()))


def write_item(
    key: str, shape: Sequence[int], dtype: torch.dtype, offsets: Sequence[int], sizes: Sequence[int]
) -> WriteItem:
    """Return what DCP plans for one box of a tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class Value:
    """Anything but a tensor."""

    content: Any
    owned: bool = True


def spread(value: Any, turn: int, rank: int) -> LocalShards | Value:
    """Return what this process has of a value; what is not distributed is the same on all processes, and the
    first one saves it. `turn` counts the values, so that processes with the same boxes share the work."""
    if isinstance(value, (LocalShards, Value)):
        return value
    if is_dtensor(value):
        return _of_distributed(value, turn)
    if isinstance(value, Tensor):
        return whole(value.detach(), rank == 0)
    return Value(value, rank == 0)


def whole(tensor: Tensor, owned: bool = True) -> LocalShards:
    return LocalShards(tuple(tensor.shape), tensor.dtype, (Shard((0,) * tensor.ndim, tensor),), owned)


def local_part(value: DTensor) -> Tensor:
    """Return the local part of a distributed tensor, without its history."""
    return value.detach().to_local()  # type: ignore[no-any-return, attr-defined]


def _of_distributed(value: DTensor, turn: int) -> LocalShards:
    mesh, local = value.device_mesh, local_part(value)
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    owned = bool((mesh.mesh == 0).any()) and all(  # other meshes of the run have copies
        coordinate[dim] == turn % mesh.size(dim)
        for dim, placement in enumerate(value.placements)
        if placement.is_replicate()
    )
    chunks = value.__create_chunk_list__() if local.numel() else []  # type: ignore[no-untyped-call]
    shards = tuple(Shard(tuple(chunk.offsets), local) for chunk in chunks)
    return LocalShards(tuple(value.shape), value.dtype, shards, owned)


def rejoin(value: Any, like: Any = None) -> Any:
    """Return a tensor from its boxes, distributed as `like` is; anything else as it is."""
    if not isinstance(value, LocalShards):
        return value
    if not is_dtensor(like) or tuple(like.shape) != value.shape:
        return value.shards[0].tensor
    local = local_part(like)
    own = value.shards[0].tensor if value.shards else torch.empty(local.shape, dtype=value.dtype)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own.to(local.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut a range of a tensor's elements, counted row by row, into boxes, in the order of the elements."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _in_row(shape, first - 1, start, stop, row)
        return
    yield from _in_row(shape, first - 1, start, first * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, stop, row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int, row: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start - index * row, stop - index * row):
        yield (index, *offsets), (1, *sizes)


def shards_of_range(values: Tensor, shape: Sequence[int], start: int) -> tuple[Shard, ...]:
    """Return the boxes that a range of a tensor's elements makes, as views; `start` is counted row by row."""
    shards, done = [], 0
    for offsets, sizes in boxes(shape, start, start + values.numel()):
        count = math.prod(sizes)
        shards.append(Shard(offsets, values[done : done + count].view(sizes)))
        done += count
    return tuple(shards)


class ShardOwner(Protocol):
    """What has a state in shards; nothing here needs another process."""

    @property
    def root(self) -> str: ...  # MODEL or OPTIMIZER: the key of the state

    def state(self) -> dict[KeyPath, Any]:
        """Return the state: live tensors, what this process has of tensors, and other values."""

    def targets(self, index: ShardIndex, options: Load) -> dict[KeyPath, LocalShards | None]:
        """Return memory for what this process reads; None for other values."""

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        """Return what brings the object to a state that was read."""


def folder_of(root: str, index: int) -> str:
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
        live = self.state()
        own = {str(path[1]): value for path, value in live.items()}
        stored = {str(path[1]): index.stored(path) for path in index.paths}
        check_weights(own, stored, index.folder, self.module, strict=options.model.get("strict", True))
        return {path: memory_for(stored[path[1]], value) for path, value in live.items() if path[1] in stored}

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        name = f"{type(self.module).__name__} ({FSDP_MODEL_NAME})"

        def apply() -> None:
            live = self.state()
            state = {path[1]: rejoin(value, live.get(path)) for path, value in values.items()}
            with options.fitting(FSDP_MODEL_NAME, type(self.module).__name__):
                fill(self.module, state, options.folder / FSDP_MODEL_NAME, options.model)

        return Change(apply, name, Stage.COLLECTIVE)


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
        whole = self.optimizer.state_dict()
        refuse_unnamed_state(self.optimizer, whole)
        named = by_name(whole, self.names)
        states = {
            (OPTIMIZER, STATE, name, key): value
            for name, values in named[STATE].items()
            for key, value in values.items()
        }
        return {**states, **group_paths(named[GROUPS], [group[PARAMETERS] for group in named[GROUPS]])}

    def targets(self, index: ShardIndex, options: Load) -> dict[KeyPath, LocalShards | None]:
        numbers, parameters = parameter_numbers(self.names), self._parameters()
        refuse_other_optimizer(index, numbers, len(self.names), self.optimizer)
        return {
            path: memory_for(index.stored(path), parameters[numbers[path[2]]] if path[1] == STATE else None)
            for path in index.paths
        }

    def plan(self, values: Mapping[KeyPath, Any], options: Load) -> Change:
        numbers, parameters = parameter_numbers(self.names), self._parameters()
        states: dict[int, dict[str, Any]] = {}
        for path, value in values.items():
            if path[1] == STATE:
                number = numbers[path[2]]
                states.setdefault(number, {})[path[3]] = rejoin(value, parameters[number])
        groups = loaded_groups(self.optimizer, values, numbers)
        return optimizer_change(self.optimizer, states, groups, options)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def group_paths(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[KeyPath, Any]:
    """Return the settings of an optimizer's groups by their paths."""
    return {
        (OPTIMIZER, GROUPS, index, key): list(own) if key == PARAMETERS else value
        for index, (group, own) in enumerate(zip(groups, names, strict=True))
        for key, value in group.items()
    }


def refuse_other_optimizer(index: ShardIndex, known: Container[str], groups: int, optimizer: Any) -> None:
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
    """Return the groups of a state dict, with the settings read; a parameter may have several names."""
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
    """Returns the change of an optimizer to states, by the numbers of its parameters, and groups."""
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    state = {STATE: dict(states), GROUPS: [dict(group) for group in groups]}
    with options.fitting(OPTIMIZER, kind):
        check_optimizer(optimizer, state)

    def apply() -> None:
        with options.fitting(OPTIMIZER, kind):
            optimizer.load_state_dict(state)

    return Change(apply, f"{kind} ({OPTIMIZER})")


def refuse_unnamed_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Refuse a state dict with state that belongs to no parameter: it would not be loaded again."""
    unknown = [str(key) for key in state[STATE] if not isinstance(key, int)]
    if unknown:
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        raise CheckpointError(
            f"{kind} holds state that belongs to no parameter ({listed(unknown)}), which a sharded "
            "run cannot save. Keep it in param_groups or in the state of a parameter, or use another one."
        )


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
