"""Merge of a sharded checkpoint into files of full weights.

`merge_fsdp_weights` is public, and `accelerate merge-weights` calls it. It reads and writes one file of the
result at a time, so that a model larger than the memory can be merged.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate import ops
from accelerate.base import FSDP_MODEL_NAME, wrong_value
from accelerate.checkpointing import (
    MODEL,
    KeyPath,
    ShardIndex,
    plan_files,
    shard_files,
    shard_index,
    single_shard,
    write_files,
)

MAX_FILE_BYTES = 5 * 10**9
"""Largest size of a file, except for files with a single larger tensor."""

Tensors = dict[KeyPath, Tensor]
"""Tensors of a sharded checkpoint by their keys in its index, on the meta device."""


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merges the sharded checkpoint of a model into full weights.

    Called on all ranks or in a single process. Rank 0 reads and writes one file of the result at a time, so
    that the memory for one file is sufficient. The files get their names after all of them are written, and
    those of an earlier result are removed.

    Args:
        checkpoint_dir: Folder that `torch.distributed.checkpoint` wrote, or a folder of `save_state` that
            contains it as ``pytorch_model_fsdp_0``.
        output_path: Folder for the result, which is created.
        safe_serialization: Whether to write safetensors instead of pickle files. Default: True.
        remove_checkpoint_dir: Whether to remove the sharded checkpoint afterwards. Default: False.

    Raises:
        ConfigurationError: There is no sharded checkpoint of a model, or the output is in the folder that is
            to be removed.
        CheckpointError: A file of the checkpoint, which is named, is missing, truncated or damaged.
    """
    source, target = Path(checkpoint_dir), Path(output_path)
    if remove_checkpoint_dir and target.resolve().is_relative_to(source.resolve()):
        reason = "the result would be removed together with the checkpoint"
        raise wrong_value(
            "output_path", str(target.resolve()), reason, "Choose a folder outside the checkpoint"
        )
    merge = partial(_merge, source, target, safe_serialization, removes_source=remove_checkpoint_dir)
    if dist.is_available() and dist.is_initialized():
        ops.run_on_rank_0(merge)
    else:
        merge()


def _merge(
    source: Path,
    target: Path,
    safe: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
    *,
    removes_source: bool = False,
) -> None:
    index = _read_index(source)
    keys = {_name(key): key for key in index.paths}
    tensors = {name: stored for name, key in keys.items() if (stored := index.stored(key)) is not None}
    if not tensors:
        reason, fix = "it holds no tensors", "Name a model's checkpoint"
        raise wrong_value("checkpoint_directory", str(index.folder), reason, fix)
    plan = plan_files(tensors, max_file_bytes, safe)
    contents = (_load(index, {keys[name]: tensors[name] for name in names}) for names in plan.files.values())
    write_files(plan, contents, target, sum(tensor.nbytes for tensor in tensors.values()), "Merging weights")
    if removes_source:
        shutil.rmtree(source)


def _read_index(source: Path) -> ShardIndex:
    """Reads the index of the sharded checkpoint in a folder or in its subfolder."""
    for folder in (source, source / f"{FSDP_MODEL_NAME}_0"):
        if os.path.isfile(folder / shard_index.NAME):  # also False for a name that is too long
            return shard_index.read(folder, MODEL)
    reason = f"the folder contains no sharded checkpoint: it has no file {shard_index.NAME}"
    raise wrong_value("checkpoint_directory", str(source), reason, "Name the folder with the model's shards")


def _name(key: KeyPath) -> str:
    return ".".join(map(str, key[1:]))


def _load(index: ShardIndex, group: Tensors) -> dict[str, Tensor]:
    memory = {key: torch.empty_like(tensor, device="cpu") for key, tensor in group.items()}
    shard_files.read(index, {key: single_shard(tensor) for key, tensor in memory.items()}, {})
    return {_name(key): tensor for key, tensor in memory.items()}
