"""A sharded checkpoint -> files of whole weights, a few gigabytes at a time."""

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
"""Largest file written, and with it the memory that is taken; a larger tensor is a file of its own."""

Tensors = dict[KeyPath, Tensor]
"""Tensors of a sharded checkpoint by their keys in its index, on the meta device."""


Format = tuple[str, str, Callable[[dict[str, Tensor], Path], None]]
"""The pattern of file names, the name of the index, and the function that writes a file."""

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
    """Merge a sharded checkpoint of a model into whole weights; called on all ranks, rank 0 works.

    The tensors are read and written a file at a time, so that memory is needed for one file of the result and
    not for the model. Files appear under their names when all are written.

    Args:
        checkpoint_dir: folder that `torch.distributed.checkpoint` wrote, or the folder of a whole checkpoint
            that holds it as ``pytorch_model_fsdp_0``.
        output_path: folder for the result; it is made.
        safe_serialization: write safetensors; else what `torch.save` writes.
        remove_checkpoint_dir: remove the sharded checkpoint afterwards.

    Raises:
        ConfigurationError: there is no sharded checkpoint of a model, or the output is in its folder and the
            folder is to be removed.
        CheckpointError: a file of it is missing, cut off or damaged; it is named.
    """
    source, target = Path(checkpoint_dir), Path(output_path)
    if remove_checkpoint_dir and target.resolve().is_relative_to(source.resolve()):
        reason = "the result would be removed together with the checkpoint"
        raise wrong_value(
            "output_path", str(target.resolve()), reason, "Choose a folder outside the checkpoint"
        )
    joined = dist.is_available() and dist.is_initialized()
    if not joined or dist.get_rank() == 0:
        _merge(source, target, SAFETENSORS if safe_serialization else PICKLE)
        if remove_checkpoint_dir:
            shutil.rmtree(source)
    if joined:
        dist.barrier()


def _merge(source: Path, target: Path, form: Format, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    pattern, index_name, save = form
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
    """Read which tensors the checkpoint in a folder, or in that of a whole checkpoint, has."""
    for folder in (source, source / f"{FSDP_MODEL_NAME}_0"):
        if os.path.isfile(folder / shard_index.NAME):  # False for a name that is too long, too
            return shard_index.read(folder, MODEL)
    reason = f"this is no folder with a sharded checkpoint: it has no file {shard_index.NAME}"
    raise wrong_value("checkpoint_directory", str(source), reason, "Name the folder with the model's shards")


def _name(key: KeyPath) -> str:
    return ".".join(map(str, key[1:]))


def _load(index: ShardIndex, group: Tensors) -> dict[str, Tensor]:
    memory = {key: torch.empty_like(tensor, device="cpu") for key, tensor in group.items()}
    shard_files.read(index, {key: single_shard(tensor) for key, tensor in memory.items()}, {})
    return {_name(key): tensor for key, tensor in memory.items()}
