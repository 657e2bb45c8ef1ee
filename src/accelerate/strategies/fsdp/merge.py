"""Merge of a sharded checkpoint into files of full weights.

`merge_fsdp_weights` is public, and `accelerate merge-weights` calls it. It reads and writes one file of the
result at a time, so that a model larger than the memory can be merged.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.base import (
    FSDP_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
    advance,
    expect,
    progress_bar,
    replace_files,
    wrong_value,
)
from accelerate.checkpointing import MODEL, KeyPath, ShardIndex, shard_files, shard_index, single_shard
from accelerate.weights import write_whole_tensors

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest size of a file, except for files with a single larger tensor."""

Tensors = dict[KeyPath, Tensor]
"""Tensors of a sharded checkpoint by their keys in its index, on the meta device."""


Format = tuple[str, str, Callable[[dict[str, Tensor], Path], None]]
"""Pattern of the file names, name of the index, and function that writes a file."""

SAFETENSORS: Format = (
    SAFE_WEIGHTS_PATTERN_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    lambda tensors, path: write_whole_tensors(tensors, {}, path),
)
PICKLE: Format = (WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME, torch.save)


@progress_bar("Merging weights")
def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merges the sharded checkpoint of a model into full weights.

    Called on all ranks or in a single process. Rank 0 reads and writes one file of the result at a time, so
    that the memory for one file is sufficient. The files get their names after all of them are written.

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
    is_distributed = dist.is_available() and dist.is_initialized()
    if not is_distributed or dist.get_rank() == 0:
        _merge(source, target, SAFETENSORS if safe_serialization else PICKLE)
        if remove_checkpoint_dir:
            shutil.rmtree(source)
    if is_distributed:
        dist.barrier()


def _merge(source: Path, target: Path, file_format: Format, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    pattern, index_name, save = file_format
    index = _read_index(source)
    keys = {_name(key): key for key in index.paths}
    tensors = {name: stored for name, key in keys.items() if (stored := index.stored(key)) is not None}
    if not tensors:
        reason, fix = "it holds no tensors", "Name a model's checkpoint"
        raise wrong_value("checkpoint_directory", str(index.folder), reason, fix)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=pattern,
        max_shard_size=shard_bytes,
    )
    files = split.filename_to_tensors
    expect(sum(tensor.nbytes for tensor in tensors.values()))
    target.mkdir(parents=True, exist_ok=True)
    with replace_files([target / file for file in files]) as temporary:
        for names, path in zip(files.values(), temporary, strict=True):
            save(_load(index, {keys[name]: tensors[name] for name in names}), path)
            advance(sum(tensors[name].nbytes for name in names))
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        content = {"metadata": split.metadata, "weight_map": weight_map}
        with replace_files([target / index_name]) as (path,):
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
