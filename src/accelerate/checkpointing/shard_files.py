"""Files of shards: planned, written and read by the planners of torch.distributed.checkpoint (DCP).

Each rank plans, writes and reads by itself, and rank 0 writes the metadata from what all ranks report over
the store: `dcp.save` and `dcp.load` exchange their plans over the process group, which a background save must
not use.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from accelerate.checkpointing.parts import Payload
from accelerate.checkpointing.shard_index import NAME, KeyPath, ShardIndex
from accelerate.checkpointing.sharded import LocalShards, Value, spread, write_item
from accelerate.weights import memory_of, read_torch

State = Mapping[KeyPath, Any]  # tensors, local shards of tensors, and other values, by their paths

Report = list[list[Any]]
"""For each item that a rank has written: its path, the box of a tensor or None, and its bytes; as JSON."""

UNREADABLE = (OSError, RuntimeError, EOFError, KeyError, ValueError, AssertionError, pickle.PickleError)
"""What DCP's reader raises for a file that is cut off or damaged."""


def payload(folder: str, rank: int, state: State) -> Payload:
    """Return the file of one process; its state, of live objects, has the same order on all processes."""
    owned: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for turn, (path, value) in enumerate(state.items()):
        own = spread(value, turn, rank)
        if own.owned:
            key = _key(path)
            paths[key] = path
            owned[key] = own.content if isinstance(own, Value) else own
    plan = replace(create_default_local_save_plan(owned, is_coordinator=True), planner_data=paths)
    content = [_look_up(owned, item.index) for item in plan.items]
    return Payload(f"{folder}/__{rank}_0.distcp", content, partial(write, plan, rank), finish)


def _key(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _look_up(state: Mapping[str, Any], index: MetadataIndex) -> Any:
    value = state[index.fqn]
    return value.__get_tensor_shard__(index) if isinstance(value, LocalShards) else value


class _Content(DefaultSavePlanner):
    """Gives the content of items, which are live objects or staged copies of them."""

    def __init__(self, content: Mapping[MetadataIndex, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self._content = content

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._content[index]


class _Writer(FileSystemWriter):
    """Writes in a thread, to a hidden folder that is renamed afterwards.

    `seal` syncs the files. Tensors are copied to the CPU one by one, because DCP awaits its copies ahead on
    the current device, which is another one in a new thread. The metadata does not name the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def write(plan: SavePlan, rank: int, content: list[Any], path: Path) -> Report:
    """Write the file of one process, shared memory once; return what the metadata needs."""
    by_index = {item.index: value for item, value in zip(plan.items, content, strict=True)}
    first: dict[Any, MetadataIndex] = {}
    stored_as = {index: first.setdefault(memory_of(value), index) for index, value in by_index.items()}
    items = [item for item in plan.items if stored_as[item.index] == item.index]
    writer = _Writer(path.parent)
    plans = [SavePlan([])] * rank + [SavePlan(items)]  # the number of a plan names its file
    own = writer.prepare_global_plan(plans)[rank]
    try:
        results = writer.write_data(own, _Content(by_index)).wait()
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
    """Write the metadata of a folder with all files, from what `write` returned on each process."""
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
    _check_whole(metadata)
    metadata.planner_data = paths
    _Writer(folder).finish(metadata, [results])


def _check_whole(metadata: Metadata) -> None:
    """Refuse tensors with missing or repeated boxes; DCP accepts both where one rank saves."""
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


class _Targets(DefaultLoadPlanner):
    """Says where the content of items goes; other values than tensors are read with the arguments of
    `torch.load`, because DCP's planner would run whatever code they hold."""

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


def read(
    index: ShardIndex, targets: Mapping[KeyPath, LocalShards | None], reading: Mapping[str, Any]
) -> dict[KeyPath, Any]:
    """Read what this process needs into boxes of memory, and other values, for which the target is None.
    One file is read at a time: DCP's reader does not say in which file it failed."""
    keys = {index.paths[path]: path for path in targets}
    index.check_files(keys)
    planner = _Targets({key: targets[path] for key, path in keys.items()}, reading)
    by_file: dict[str, list[ReadItem]] = {}
    for item in create_default_local_load_plan(planner.state_dict, index.metadata).items:
        info = index.metadata.storage_data.get(item.storage_index)
        if info is None:
            name = item.storage_index.fqn
            raise CheckpointError(f"{index.folder.name}/{NAME} does not say where a part of {name} is stored")
        by_file.setdefault(info.relative_path, []).append(item)
    reader = FileSystemReader(index.folder)
    reader.set_up_storage_reader(index.metadata, True)
    for file, items in by_file.items():
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except AccelerateError:
            raise
        except UNREADABLE as error:
            raise CheckpointError(
                f"{index.folder.name}/{file} cannot be read: it is damaged, or another file "
                f"({describe(error)})"
            ) from error
    return {path: planner.state_dict[key] for key, path in keys.items()}
