"""The local shards of a tensor: for each its values, and its offsets in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerate.ops import is_dtensor

if TYPE_CHECKING:  # they take half a second to import
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor

KeyPath = tuple[Any, ...]  # the keys on the way to a value in nested dictionaries: ("model", "layer.weight")

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
    """Return a tensor that is whole on this rank."""
    return LocalShards(tuple(tensor.shape), tensor.dtype, (Shard((0,) * tensor.ndim, tensor),), owned)


def local_part(value: DTensor) -> Tensor:
    """Return the local part of a distributed tensor, without its history."""
    detached: Any = value.detach()
    local: Tensor = detached.to_local()
    return local


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
