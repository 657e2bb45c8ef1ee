"""Read boxes of tensors from files of shards by torch's reader, which takes long to import."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from accelerate.base import AccelerateError, CheckpointError, describe
from accelerate.checkpointing.local_shards import LocalShards
from accelerate.checkpointing.shard_index import NAME, Place, ShardIndex
from accelerate.weights import read_torch

UNREADABLE = (OSError, RuntimeError, EOFError, KeyError, ValueError, AssertionError, pickle.PickleError)
"""What torch's reader makes of a file that is not what it should be."""


def read(
    found: ShardIndex, targets: Mapping[Place, LocalShards | None], reading: Mapping[str, Any]
) -> dict[Place, Any]:
    """Do what `shards.read` says."""
    keys = {found.places[place]: place for place in targets}
    found.check_files(keys)
    planner = _Reading({key: targets[place] for key, place in keys.items()}, reading)
    by_file: dict[str, list[ReadItem]] = {}
    for item in planner.items(found.metadata):
        info = found.metadata.storage_data.get(item.storage_index)
        if info is None:
            name = item.storage_index.fqn
            raise CheckpointError(f"{found.folder.name}/{NAME} does not say where a part of {name} lies")
        by_file.setdefault(info.relative_path, []).append(item)
    reader = FileSystemReader(found.folder)
    reader.set_up_storage_reader(found.metadata, True)
    for file, items in by_file.items():
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except AccelerateError:
            raise
        except UNREADABLE as error:
            raise CheckpointError(
                f"{found.folder.name}/{file} cannot be read: it is damaged, or another file "
                f"({describe(error)})"
            ) from error
    return {
        place: planner.values[key] if targets[place] is None else targets[place]
        for key, place in keys.items()
    }


class _Reading(DefaultLoadPlanner):
    """Tells torch's reader where the boxes go.

    Args:
        targets: boxes by key; None for other values.
        reading: arguments of `torch.load` for other values.
    """

    def __init__(self, targets: Mapping[str, LocalShards | None], reading: Mapping[str, Any]) -> None:
        super().__init__()
        self._targets = targets
        self._arguments = reading
        self.values: dict[str, Any] = {}

    def items(self, metadata: Metadata) -> list[ReadItem]:
        """Return what is read: each box of a file that meets a box in memory."""
        found: list[ReadItem] = []
        for key, target in self._targets.items():
            entry = metadata.state_dict_metadata[key]
            if target is None:
                found.append(_item_of_value(key))
            elif isinstance(entry, TensorStorageMetadata):
                chunks = [
                    ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.shape)
                    for shard in target.shards
                    if shard.tensor.numel()
                ]
                found += create_read_items_for_chunk_list(key, entry, chunks)
        return found

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._targets[read_item.dest_index.fqn]
        assert target is not None
        offsets = tuple(read_item.dest_index.offset or ())
        tensor = next(shard.tensor for shard in target.shards if shard.offsets == offsets)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the memory is filled."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        value.name = read_item.dest_index.fqn  # for messages
        self.values[read_item.dest_index.fqn] = read_torch(value, "cpu", **self._arguments)


def _item_of_value(key: str) -> ReadItem:
    index, nowhere = MetadataIndex(key), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
