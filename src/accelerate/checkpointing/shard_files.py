"""Files of shards: each process writes one, and reads from all of them what it needs.

The format is that of `torch.distributed.checkpoint`: boxes of tensors one after another, each as `torch.save`
writes it, and their metadata. No process talks to another here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate.checkpointing import shard_index
from accelerate.checkpointing.local_shards import LocalShards, Value, spread
from accelerate.checkpointing.part import Payload
from accelerate.checkpointing.shard_index import Entry, Place, ShardIndex

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
        for shard in own.shards:
            entries.append(Entry(place, own.shape, own.dtype, shard.offsets, tuple(shard.tensor.shape)))
            content.append(shard.tensor)
    name = f"{folder}/__{rank}_0.distcp"
    return Payload(name, content, partial(write, entries), shard_index.write)


def write(entries: Sequence[Entry], content: Sequence[Any], path: Path) -> shard_index.Report:
    """Write the file of one process.

    Args:
        entries: what `content` is.
        content: tensors and other values. Tensors that share memory are stored once.
        path: the file.

    Returns:
        What the metadata needs to know.

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
    return shard_index.pack(written)


def _memory(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.data_ptr():  # a tensor that wraps others has no address
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
    found: ShardIndex, targets: Mapping[Place, LocalShards | None], reading: Mapping[str, Any]
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
    from accelerate.checkpointing.shard_reader import read  # and with it torch's, which takes long to import

    return read(found, targets, reading)
