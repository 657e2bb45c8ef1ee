"""Files of shards, written and read with the planners of torch.distributed.checkpoint (DCP).

`payload` plans the file of one rank, `write` writes it, and `finish` writes the metadata from the reports of
all ranks. `Saver` calls them. `dcp.save` and `dcp.load` are not used, because they exchange their plans with
collectives, which a background save must not use. `read` reads the shards that one rank needs.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from accelerate import torch_private
from accelerate.base import AccelerateError, CheckpointError, describe, listed
from accelerate.checkpointing.local_shards import (
    LocalShards,
    PlainValue,
    Shard,
    box_of,
    to_local_shards,
    write_item,
)
from accelerate.checkpointing.manifest import MapFile
from accelerate.checkpointing.parts import Payload, warn_of_refused
from accelerate.checkpointing.shard_index import NAME, KeyPath, ShardIndex
from accelerate.weights import memory_of, read_torch, refused_values

State = Mapping[KeyPath, Any]
"""Tensors, local shards of tensors, and other values by their paths."""

SUFFIX = ".distcp"

Report = list[list[Any]]
"""Path, box or None, and position in its file of each item that a rank has written, for JSON."""

ZIP_HEADER = struct.Struct("<4s5H3L2H")
"""Header of a file in a zip archive, which ends with the lengths of its name and of its extra field."""

READ_ERRORS = (
    OSError,
    RuntimeError,
    EOFError,
    KeyError,
    ValueError,
    AssertionError,
    pickle.PickleError,
    zipfile.BadZipFile,
)
"""Errors of DCP's reader for a damaged file."""


def payload(folder: str, rank: int, state: State) -> Payload:
    """Returns the file of one rank.

    Args:
        folder: Folder of the shards, relative to the staging folder, or "" for the staging folder itself.
        state: Values of live objects, in the same order on all ranks.
    """
    return _payload(folder, f"__{rank}_0{SUFFIX}", _owned(rank, state))


def payloads(folder: str, rank: int, state: State) -> list[Payload]:
    """Returns the files of one rank, one of them with the values that all ranks read."""
    owned = _owned(rank, state)
    shards = {path: local for path, local in owned.items() if _is_sharded(local)}
    values = {path: local for path, local in owned.items() if path not in shards}
    files = ((f"__{rank}_values_0{SUFFIX}", values), (f"__{rank}_0{SUFFIX}", shards))
    return [_payload(folder, name, own) for name, own in files if own] or [payload(folder, rank, state)]


def _owned(rank: int, state: State) -> dict[KeyPath, LocalShards | PlainValue]:
    local = {path: to_local_shards(value, index, rank) for index, (path, value) in enumerate(state.items())}
    return {path: value for path, value in local.items() if value.owned}


def _is_sharded(local: LocalShards | PlainValue) -> bool:
    """Returns whether some ranks do not read a value."""
    is_part = isinstance(local, LocalShards) and [part.tensor.shape for part in local.shards] != [local.shape]
    return is_part or local.is_private


def _payload(folder: str, name: str, values: Mapping[KeyPath, LocalShards | PlainValue]) -> Payload:
    paths = {_key(path): path for path in values}
    owned = {
        _key(path): local.content if isinstance(local, PlainValue) else local
        for path, local in values.items()
    }
    plan = replace(create_default_local_save_plan(owned, is_coordinator=True), planner_data=paths)
    content = [_look_up(owned, item.index) for item in plan.items]
    return Payload((PurePosixPath(folder) / name).as_posix(), content, partial(write, plan), finish)


def _key(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _look_up(state: Mapping[str, Any], index: MetadataIndex) -> Any:
    value = state[index.fqn]
    return value.__get_tensor_shard__(index) if isinstance(value, LocalShards) else value


class _ContentPlanner(DefaultSavePlanner):
    """Planner that takes the content of items from live objects or copies of them."""

    def __init__(self, content: Mapping[MetadataIndex, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self._content = content

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._content[index]


class _Writer(FileSystemWriter):
    """DCP's writer for a thread, and for a folder that is renamed later.

    `seal` flushes the files to disk. Tensors are copied to the CPU one by one, because DCP waits for copies
    in advance on the current device, which is another device in a new thread. The metadata does not name the
    folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def write(plan: SavePlan, content: list[Any], path: Path) -> Report:
    """Writes the file of one rank, with shared memory once, and returns the report for the metadata."""
    by_index = {item.index: value for item, value in zip(plan.items, content, strict=True)}
    first: dict[Any, MetadataIndex] = {}
    stored_as = {index: first.setdefault(memory_of(value), index) for index, value in by_index.items()}
    items = [item for item in plan.items if stored_as[item.index] == item.index]
    writer = _Writer(path.parent)
    (own,) = writer.prepare_global_plan([SavePlan(items)])
    own = replace(own, storage_data=replace(own.storage_data, prefix=path.name.removesuffix(f"0{SUFFIX}")))
    try:
        results = writer.write_data(own, _ContentPlanner(by_index)).wait()
    except RuntimeError as error:  # torch raises it where the disk is full
        raise OSError(f"{path} could not be written: {error}") from error
    others = {item.index.fqn: by_index[item.index] for item in items if item.type == WriteItemType.BYTE_IO}
    warn_of_refused(path.parent.name, refused_values(others))
    infos = {result.index: result.storage_data for result in results}
    return [_report(plan.planner_data, item, infos[stored_as[item.index]]) for item in plan.items]


def _report(paths: Mapping[str, KeyPath], item: WriteItem, info: Any) -> list[Any]:
    data, box = item.tensor_data, None
    if data is not None:
        dtype = str(data.properties.dtype).removeprefix("torch.")
        box = [data.size, dtype, data.chunk.offsets, data.chunk.sizes]
    return [paths[item.index.fqn], box, [info.relative_path, info.offset, info.length]]


def finish(folder: Path, reports: Iterable[Report]) -> None:
    """Writes the metadata of a folder from the reports of all ranks."""
    plans: list[SavePlan] = []
    results: list[WriteResult] = []
    paths: dict[str, KeyPath] = {}
    for report in reports:
        items = []
        for path, box, info in report:
            key = _key(path)
            paths[key] = tuple(path)
            if box is None:
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            else:
                shape, dtype, offsets, sizes = box
                items.append(write_item(key, shape, getattr(torch, dtype), offsets, sizes))
            results.append(WriteResult(items[-1].index, info[2], torch_private.StorageInfo(*info)))
        plans.append(SavePlan(items))
    _, metadata = create_default_global_save_plan(plans)
    _check_complete(metadata)
    metadata.planner_data = paths
    _Writer(folder).finish(metadata, [results])


def _check_complete(metadata: Metadata) -> None:
    """Raises for tensors with missing or repeated boxes, both of which DCP accepts from a single rank."""
    wrong = [
        key
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size)
    ]
    if wrong:
        raise CheckpointError(
            f"The parts of {listed(wrong)} do not make whole tensors: the processes hold others than they "
            "say. Save whole states: FSDP_STATE_DICT_TYPE=FULL_STATE_DICT"
        )


class _TargetPlanner(DefaultLoadPlanner):
    """Planner that collects tensors and other values, which it reads with the arguments of `torch.load`.

    DCP's own planner would run any code in the other values.
    """

    def __init__(self, targets: Mapping[str, LocalShards | None], reading: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.targets = targets
        self._reading = reading
        self._values: dict[str, Any] = {}
        self._tensors = {
            (key, shard.offsets): shard.tensor
            for key, target in targets.items()
            for shard in (target.shards if target is not None else ())
        }

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._memory(index.fqn, tuple(index.offset or ()))

    def _memory(self, *shard: Any) -> Tensor:
        """Returns the memory of a shard, which is allocated now if it is on the meta device."""
        if self._tensors[shard].is_meta:
            self._tensors[shard] = torch.empty_like(self._tensors[shard], device="cpu")
        return self._tensors[shard]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        value.name = key  # for messages
        self._values[key] = read_torch(value, "cpu", **self._reading)

    def take(self, item: ReadItem, stored: Tensor) -> None:
        """Copies a part of a stored tensor into a shard, or makes a shard without memory a view of it."""
        shard = item.dest_index.fqn, tuple(item.dest_index.offset or ())
        part, own = box_of(stored, item.storage_offsets, item.lengths), self._tensors[shard]
        if own.is_meta and (own.shape, own.dtype) == (part.shape, part.dtype):
            self._tensors[shard] = part
        else:
            box_of(self.lookup_tensor(item.dest_index), item.dest_offsets, item.lengths).copy_(part)

    def value(self, key: str) -> Any:
        """Returns the shards of a tensor that were read, or another value."""
        if (target := self.targets[key]) is None:
            return self._values[key]
        shards = tuple(Shard(shard.offsets, self._memory(key, shard.offsets)) for shard in target.shards)
        return replace(target, shards=shards)


class _TensorReader:
    """Reads tensors from a file of shards, each of which is an archive of `torch.save` in it.

    The archives of contiguous tensors with the same shape and dtype begin with the same bytes. The first one
    is read by torch, and the values in the others are read or mapped at the same position. Other archives are
    read by torch.

    Args:
        index: Metadata of the folder.
        file: The file, or its memory map, of which tensors are views.
    """

    def __init__(self, index: ShardIndex, file: io.BufferedReader | mmap.mmap) -> None:
        self._metadata, self._file = index.metadata, file
        self._heads: dict[tuple[torch.dtype, torch.Size], bytes] = {}

    def read(self, index: MetadataIndex) -> Tensor:
        entry: Any = self._metadata.state_dict_metadata[index.fqn]
        layout = entry.properties.dtype, entry.chunks[index.index].sizes
        position = self._metadata.storage_data[index].offset
        head = self._heads.get(layout, b"")
        if head and self._bytes(position, len(head)) == head:
            return self._values(position + len(head), *layout)
        archive = self._bytes(position, self._metadata.storage_data[index].length)
        tensor: Tensor = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
        if (tensor.dtype, tensor.shape) == layout and tensor.numel():
            self._heads[layout] = _head_of(archive, tensor)
        return tensor

    def _bytes(self, position: int, size: int) -> bytes:
        self._file.seek(position)
        return self._file.read(size)

    def _values(self, position: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        if isinstance(self._file, mmap.mmap):
            values = torch.frombuffer(self._file, dtype=dtype, count=math.prod(shape), offset=position)
            return values.view(shape)
        tensor = torch.empty(shape, dtype=dtype)
        self._file.seek(position)
        if self._file.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != tensor.nbytes:
            raise EOFError("the file is truncated")
        return tensor


def _head_of(archive: bytes, tensor: Tensor) -> bytes:
    """Returns the bytes before the values in an archive of a tensor, or none if it is not contiguous."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        entries = {name.partition("/")[2]: entry for name, entry in files.NameToInfo.items()}
        order = files.read(entries["byteorder"]) if "byteorder" in entries else b""
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    values = entries["data/0"]
    if order.decode() != sys.byteorder or not is_plain or values.file_size != tensor.nbytes:
        return b""
    *_, name, extra = ZIP_HEADER.unpack_from(archive, values.header_offset)
    return archive[: values.header_offset + ZIP_HEADER.size + name + extra]


def items_by_file(
    index: ShardIndex, targets: Mapping[KeyPath, LocalShards | None]
) -> dict[str, list[ReadItem]]:
    """Returns the items that `read` reads from each file."""
    by_file: dict[str, list[ReadItem]] = {}
    by_key = {index.paths[path]: target for path, target in targets.items()}
    for item in create_default_local_load_plan(by_key, index.metadata).items:
        info = index.metadata.storage_data.get(item.storage_index)
        if info is None:
            name = item.storage_index.fqn
            raise CheckpointError(f"{index.folder.name}/{NAME} does not say where a part of {name} is stored")
        by_file.setdefault(info.relative_path, []).append(item)
    return by_file


def read(
    index: ShardIndex,
    targets: Mapping[KeyPath, LocalShards | None],
    reading: Mapping[str, Any],
    map_file: MapFile | None = None,
    items: Mapping[str, Sequence[ReadItem]] | None = None,
) -> dict[KeyPath, Any]:
    """Reads shards, and other values, whose target is None.

    One file is read at a time, because DCP's reader does not report the file of an error.

    Args:
        index: Metadata of the folder.
        targets: Shards of each tensor that this rank needs, and None for each other value, by their paths.
            Shards on the meta device get new memory, and others are filled.
        reading: Arguments of `torch.load`.
        map_file: Returns the memory map of a file, of which shards on the meta device become views. None
            reads files into memory.
        items: Result of `items_by_file`, if it was called before.
    """
    keys = {index.paths[path]: path for path in targets}
    planner = _TargetPlanner({key: targets[path] for key, path in keys.items()}, reading)
    by_file = items_by_file(index, targets) if items is None else items
    index.check_files(keys, None if index.has_all_files else by_file)
    for file, own in by_file.items():
        path = index.folder / file
        try:
            with path.open("rb") as opened:
                _read_items(index, own, planner, opened if map_file is None else map_file(path))
        except AccelerateError:
            raise
        except READ_ERRORS as error:
            raise CheckpointError(
                f"{index.folder.name}/{file} cannot be read: it is damaged, or another file "
                f"({describe(error)})"
            ) from error
    return {path: planner.value(key) for key, path in keys.items()}


def _read_items(
    index: ShardIndex, items: Sequence[ReadItem], planner: _TargetPlanner, file: io.BufferedReader | mmap.mmap
) -> None:
    """Reads items of one file, with DCP's reader those that are compressed or no tensors."""
    stored, others = _TensorReader(index, file), []
    for item in items:
        info = index.metadata.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO or getattr(info, "transform_descriptors", None):
            others.append(item)
        else:
            planner.take(item, stored.read(item.storage_index))
    reader = FileSystemReader(index.folder)
    reader.set_up_storage_reader(index.metadata, True)
    reader.read_data(LoadPlan(others), planner).wait()
