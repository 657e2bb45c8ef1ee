"""Files of shards: each process writes one, and reads from all of them what it needs.

The format is that of `torch.distributed.checkpoint`: boxes of tensors one after another, each as `torch.save`
writes it, and a catalogue of them. No process talks to another here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
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

from accelerate.base.errors import AccelerateError, CheckpointError
from accelerate.base.text import describe
from accelerate.checkpointing import catalogue
from accelerate.checkpointing.catalogue import Catalogue, Entry, Place
from accelerate.checkpointing.part import Payload
from accelerate.checkpointing.spread import Spread, Value, spread
from accelerate.weights.files import read_torch

UNREADABLE = (OSError, RuntimeError, EOFError, KeyError, ValueError, AssertionError, pickle.PickleError)
"""What torch's reader makes of a file that is not what it should be."""

State = Mapping[Place, Any]
"""Tensors, what a process has of tensors, and other values, by their places."""


def payload(folder: str, rank: int, state: State) -> Payload:
    """Return the file of one process.

    Args:
        folder: of the shards, in the checkpoint.
        rank: of the process.
        state: what it has, in the same order on all processes; live objects.
    """
    entries: list[Entry] = []
    content: list[Any] = []
    for turn, (place, value) in enumerate(state.items()):
        own = spread(value, turn, rank)
        if not own.owned:
            continue
        if isinstance(own, Value):
            entries.append(Entry(place))
            content.append(own.content)
            continue
        for slab in own.slabs:
            entries.append(Entry(place, own.shape, own.dtype, slab.offsets, tuple(slab.tensor.shape)))
            content.append(slab.tensor)
    name = f"{folder}/__{rank}_0.distcp"
    return Payload(name, content, partial(write, entries), catalogue.write)


def write(entries: Sequence[Entry], content: Sequence[Any], path: Path) -> bytes:
    """Write the file of one process.

    Args:
        entries: what `content` is.
        content: tensors and other values. Tensors that share memory are stored once.
        path: the file.

    Returns:
        What the catalogue needs to know.

    Raises:
        OSError: the file cannot be written.
    """
    known: dict[Any, tuple[int, int]] = {}
    written: list[Entry] = []
    try:
        with path.open("wb") as file:
            for entry, value in zip(entries, content, strict=True):
                memory = _memory(value)
                if memory not in known:
                    start = file.tell()
                    torch.save(_alone(value), file)
                    known[memory] = (start, file.tell() - start)
                start, length = known[memory]
                written.append(replace(entry, file=path.name, start=start, length=length))
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    return catalogue.pack(written)


def _memory(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.numel():
        return id(value)
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride()


def _alone(value: Any) -> Any:
    """Return a tensor on the CPU without the rest of the memory that it is a part of."""
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().cpu()
    is_part = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor


def read(
    found: Catalogue, targets: Mapping[Place, Spread | None], reading: Mapping[str, Any]
) -> dict[Place, Any]:
    """Read what this process needs, from whichever files it lies in.

    Args:
        found: what lies where.
        targets: boxes with memory to read into; None for other values.
        reading: arguments of `torch.load` for other values.

    Returns:
        The same boxes, filled, and the values.

    Raises:
        CheckpointError: a file is missing, cut off or damaged.
    """
    keys = {found.places[place]: place for place in targets}
    _check_files(found, keys)
    planner = _Reading({key: targets[place] for key, place in keys.items()}, reading)
    by_file: dict[str, list[ReadItem]] = {}
    for item in planner.items(found.metadata):
        by_file.setdefault(found.metadata.storage_data[item.storage_index].relative_path, []).append(item)
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


def _check_files(found: Catalogue, keys: Mapping[str, Place]) -> None:
    problems = []
    for file, size in sorted(found.needed(keys).items()):
        path = found.folder / file
        if not path.is_file():
            problems.append(f"{found.folder.name}/{file} is missing")
        elif path.stat().st_size < size:
            problems.append(
                f"{found.folder.name}/{file} has {path.stat().st_size} bytes, and at least {size} are "
                "needed: it is cut off, or another file"
            )
    if problems:
        raise CheckpointError("; ".join(problems))


class _Reading(DefaultLoadPlanner):
    """Tells torch's reader where the boxes go.

    Args:
        targets: boxes by key; None for other values.
        reading: arguments of `torch.load` for other values.
    """

    def __init__(self, targets: Mapping[str, Spread | None], reading: Mapping[str, Any]) -> None:
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
                    ChunkStorageMetadata(torch.Size(slab.offsets), slab.tensor.shape)
                    for slab in target.slabs
                    if slab.tensor.numel()
                ]
                found += create_read_items_for_chunk_list(key, entry, chunks)
        return found

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._targets[read_item.dest_index.fqn]
        assert target is not None
        offsets = tuple(read_item.dest_index.offset or ())
        tensor = next(slab.tensor for slab in target.slabs if slab.offsets == offsets)
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
