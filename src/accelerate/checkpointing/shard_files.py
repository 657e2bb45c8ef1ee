"""Files of shards, written and read with the planners of torch.distributed.checkpoint (DCP).

`payload` plans the file of one rank, `write` writes it, and `finish` writes the metadata from the reports of
all ranks. `Saver` calls them. `dcp.save` and `dcp.load` are not used, because they exchange their plans with
collectives, which a background save must not use. `read` reads the shards that one rank needs.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Mapping
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from accelerate import torch_private
from accelerate.base import AccelerateError, CheckpointError, describe, listed
from accelerate.checkpointing.local_shards import LocalShards, PlainValue, to_local_shards, write_item
from accelerate.checkpointing.parts import Payload
from accelerate.checkpointing.shard_index import NAME, KeyPath, ShardIndex
from accelerate.weights import memory_of, read_torch

State = Mapping[KeyPath, Any]
"""Tensors, local shards of tensors, and other values by their paths."""

Report = list[list[Any]]
"""Path, box or None, and position in its file of each item that a rank has written, for JSON."""

READ_ERRORS = (OSError, RuntimeError, EOFError, KeyError, ValueError, AssertionError, pickle.PickleError)
"""Errors of DCP's reader for a damaged file."""


def payload(folder: str, rank: int, state: State) -> Payload:
    """Returns the file of one rank.

    Args:
        folder: Folder of the shards, relative to the staging folder, or "" for the staging folder itself.
        rank: This rank.
        state: Values of live objects, in the same order on all ranks.
    """
    owned: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for position, (path, value) in enumerate(state.items()):
        local = to_local_shards(value, position, rank)
        if local.owned:
            key = _key(path)
            paths[key] = path
            owned[key] = local.content if isinstance(local, PlainValue) else local
    plan = replace(create_default_local_save_plan(owned, is_coordinator=True), planner_data=paths)
    content = [_look_up(owned, item.index) for item in plan.items]
    name = (PurePosixPath(folder) / f"__{rank}_0.distcp").as_posix()
    return Payload(name, content, partial(write, plan, rank), finish)


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


def write(plan: SavePlan, rank: int, content: list[Any], path: Path) -> Report:
    """Writes the file of one rank, with shared memory once, and returns the report for the metadata."""
    by_index = {item.index: value for item, value in zip(plan.items, content, strict=True)}
    first: dict[Any, MetadataIndex] = {}
    stored_as = {index: first.setdefault(memory_of(value), index) for index, value in by_index.items()}
    items = [item for item in plan.items if stored_as[item.index] == item.index]
    writer = _Writer(path.parent)
    plans = [SavePlan([])] * rank + [SavePlan(items)]  # the number of a plan names its file
    plan_of_rank = writer.prepare_global_plan(plans)[rank]
    try:
        results = writer.write_data(plan_of_rank, _ContentPlanner(by_index)).wait()
    except RuntimeError as error:  # torch raises it where the disk is full
        raise OSError(f"{path} could not be written: {error}") from error
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
    """Planner that reads tensors into allocated memory, and other values with the arguments of `torch.load`.

    DCP's own planner would run any code in the other values.
    """

    def __init__(self, targets: Mapping[str, LocalShards | None], reading: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = dict(targets)
        self._reading = reading

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = _look_up(self.state_dict, index)
        return tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        value.name = key  # for messages
        self.state_dict[key] = read_torch(value, "cpu", **self._reading)


def _items_by_file(index: ShardIndex, targets: Mapping[str, Any]) -> dict[str, list[ReadItem]]:
    """Returns what is read from each file for targets by their DCP keys."""
    by_file: dict[str, list[ReadItem]] = {}
    for item in create_default_local_load_plan(dict(targets), index.metadata).items:
        info = index.metadata.storage_data.get(item.storage_index)
        if info is None:
            name = item.storage_index.fqn
            raise CheckpointError(f"{index.folder.name}/{NAME} does not say where a part of {name} is stored")
        by_file.setdefault(info.relative_path, []).append(item)
    return by_file


def files_read(index: ShardIndex, targets: Mapping[KeyPath, LocalShards | None]) -> set[str]:
    """Returns the names of the files that `read` reads."""
    return set(_items_by_file(index, {index.paths[path]: target for path, target in targets.items()}))


def read(
    index: ShardIndex, targets: Mapping[KeyPath, LocalShards | None], reading: Mapping[str, Any]
) -> dict[KeyPath, Any]:
    """Reads shards into the memory of targets, and other values, whose target is None.

    One file is read at a time, because DCP's reader does not report the file of an error.

    Args:
        index: Metadata of the folder.
        targets: Memory for each tensor that this rank needs, and None for each other value, by their paths.
        reading: Arguments of `torch.load`.
    """
    keys = {index.paths[path]: path for path in targets}
    planner = _TargetPlanner({key: targets[path] for key, path in keys.items()}, reading)
    by_file = _items_by_file(index, planner.state_dict)
    index.check_files(keys, None if index.has_all_files else by_file)
    reader = FileSystemReader(index.folder)
    reader.set_up_storage_reader(index.metadata, True)
    for file, items in by_file.items():
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except AccelerateError:
            raise
        except READ_ERRORS as error:
            raise CheckpointError(
                f"{index.folder.name}/{file} cannot be read: it is damaged, or another file "
                f"({describe(error)})"
            ) from error
    return {path: planner.state_dict[key] for key, path in keys.items()}
