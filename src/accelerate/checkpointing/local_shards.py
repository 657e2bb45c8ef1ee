"""Shards of tensors that are on this rank, with their offsets in the whole tensors.

`sharded.py` and the strategies convert plain tensors, distributed tensors and flat parameters to
`LocalShards`, which `shard_files.py` writes and reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerate.ops import is_dtensor, local_tensor

if TYPE_CHECKING:  # they take half a second to import
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets in the whole tensor, and sizes."""
NUM_PROPERTIES = 5
"""Properties of a tensor in the metadata of DCP. Older versions of torch do not read one that 2.15 adds."""


@dataclass(frozen=True)
class Shard:
    """Box of a tensor with its offsets in the whole tensor."""

    offsets: Shape
    tensor: Tensor


@dataclass(frozen=True)
class LocalShards:
    """Shards of one tensor on this rank, with the methods by which DCP's planners read a DTensor."""

    shape: Shape  # of the whole tensor
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    owned: bool = True  # whether this rank saves them, which one of the ranks with the same shards does
    is_private: bool = False  # whether other ranks do not read them

    def without_memory(self, dtype: torch.dtype | None = None) -> LocalShards:
        """Returns shards of the same boxes on the meta device, for which `shard_files.read` finds memory."""
        kind = self.dtype if dtype is None else dtype
        shards = tuple(
            Shard(shard.offsets, torch.empty(shard.tensor.shape, dtype=kind, device="meta"))
            for shard in self.shards
        )
        return LocalShards(self.shape, kind, shards, self.owned)

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
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


@dataclass(frozen=True)
class PlainValue:
    """Value that is not a tensor."""

    content: Any
    owned: bool = True
    is_private: bool = False


def _state_for_any_torch(properties: Any) -> tuple[Any, ...]:
    state: tuple[Any, ...] = type(properties).__getstate__(properties)
    return state[:NUM_PROPERTIES]


def write_item(
    key: str, shape: Sequence[int], dtype: torch.dtype, offsets: Sequence[int], sizes: Sequence[int]
) -> WriteItem:
    """Returns DCP's plan to write one box of a tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(dtype)
    # An attribute of the instance, which pickle calls in place of the method of the class
    vars(properties)["__getstate__"] = partial(_state_for_any_torch, properties)
    data = TensorWriteData(chunk, properties, torch.Size(shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def to_local_shards(value: Any, position: int, rank: int, first: int = 0) -> LocalShards | PlainValue:
    """Returns the part of a value that is on this rank.

    Values that are not distributed are equal on all ranks, and the first one saves them.

    Args:
        value: Tensor, distributed tensor or any other value.
        position: Position among all values. Ranks with the same shards take turns in saving them.
        first: First rank with these values.
    """
    if isinstance(value, (LocalShards, PlainValue)):
        return value
    if is_dtensor(value):
        return _of_distributed(value, position, first)
    if isinstance(value, Tensor):
        return single_shard(value.detach(), rank == first)
    return PlainValue(value, rank == first)


def single_shard(tensor: Tensor, owned: bool = True) -> LocalShards:
    """Returns a whole tensor as one shard."""
    return LocalShards(tuple(tensor.shape), tensor.dtype, (Shard((0,) * tensor.ndim, tensor),), owned)


def copy_shards(target: LocalShards, source: LocalShards) -> None:
    """Copies the values of shards into the tensors of other ones with the same boxes."""
    for own, read in zip(target.shards, source.shards, strict=True):
        own.tensor.copy_(read.tensor)


def box_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Returns a view of a box of a tensor."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


@torch.no_grad()  # an autograd function takes most of the time
def _of_distributed(value: DTensor, position: int, first: int) -> LocalShards:
    mesh, local = value.device_mesh, local_tensor(value).detach()
    coordinate = tuple(mesh.get_coordinate() or [0] * mesh.ndim)
    offsets = _offsets(mesh, coordinate, value.placements, value.shape, local.shape)
    owned = _has_rank(mesh, first) and all(  # other meshes of the run have replicas
        coordinate[dim] == position % mesh.size(dim)
        for dim, placement in enumerate(value.placements)
        if placement.is_replicate()
    )
    return LocalShards(tuple(value.shape), value.dtype, tuple(Shard(at, local) for at in offsets), owned)


@lru_cache(maxsize=1024)  # many tensors have the same layout, and torch computes the offsets with tensors
def _offsets(
    mesh: DeviceMesh,
    coordinate: Shape,
    placements: Sequence[Placement],
    shape: torch.Size,
    local_shape: torch.Size,
) -> list[Shape]:
    """Returns the offsets of the shards at a coordinate, which is that of this rank."""
    from torch.distributed.tensor import DTensor

    local, whole = (torch.empty(sizes, device="meta") for sizes in (local_shape, shape))
    stride = whole.stride()
    like = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    chunks = like.__create_chunk_list__() if local.numel() else []  # type: ignore[no-untyped-call]
    return [tuple(chunk.offsets) for chunk in chunks]


@lru_cache(maxsize=1024)
def _has_rank(mesh: DeviceMesh, rank: int) -> bool:
    return bool((mesh.mesh == rank).any())


def to_tensor(value: Any, like: Any = None, move: Callable[[Tensor], Tensor] = lambda own: own) -> Any:
    """Returns the tensor of local shards, distributed as `like`, and any other value unchanged.

    Args:
        value: Local shards, a plain tensor, or any other value.
        like: Tensor with the layout of the result.
        move: Returns the tensor in whose memory the result is, from that of a shard.
    """
    if isinstance(value, Tensor):
        return move(value)
    if not isinstance(value, LocalShards):
        return value
    if not is_dtensor(like) or tuple(like.shape) != value.shape:
        return move(value.shards[0].tensor)
    with torch.no_grad():
        local = local_tensor(like)
    own = value.shards[0].tensor if value.shards else torch.empty(local.shape, dtype=value.dtype)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        move(own).to(local.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def target_of(stored: Tensor | None, live: object = None) -> LocalShards | None:
    """Returns the shards of a stored tensor that this rank reads, or None for a value that is not a tensor.

    They are on the meta device, and those of the live tensor if it has the same shape as the stored one.
    """
    if stored is None:
        return None
    local = to_local_shards(live, 0, 0)
    if isinstance(local, LocalShards) and local.shape == tuple(stored.shape):
        return local.without_memory(stored.dtype)
    return single_shard(stored)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Iterates over the boxes of a range of elements in row-major order."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _boxes_in_row(shape, first - 1, start, stop, row)
        return
    yield from _boxes_in_row(shape, first - 1, start, first * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _boxes_in_row(shape, last, last * row, stop, row)


def _boxes_in_row(shape: Sequence[int], index: int, start: int, stop: int, row: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of_range(shape[1:], start - index * row, stop - index * row):
        yield (index, *offsets), (1, *sizes)


def shards_of_range(values: Tensor, shape: Sequence[int], start: int) -> tuple[Shard, ...]:
    """Returns a range of the elements of a tensor as shards, which are views.

    Args:
        values: Elements of the range, flat.
        shape: Shape of the whole tensor.
        start: Number of the first element in row-major order.
    """
    shards, done = [], 0
    for offsets, sizes in boxes_of_range(shape, start, start + values.numel()):
        count = math.prod(sizes)
        shards.append(Shard(offsets, values[done : done + count].view(sizes)))
        done += count
    return tuple(shards)
