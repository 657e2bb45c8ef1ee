"""A sharded checkpoint -> files of whole weights, a few gigabytes at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
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
from accelerate.checkpointing import MODEL, KeyPath, ShardIndex, shard_files, shard_index, whole
from accelerate.weights import write_whole_tensors

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest file written, and with it the memory that is taken; a larger tensor is a file of its own."""

Tensors = dict[KeyPath, Tensor]
"""Tensors of a sharded checkpoint by their keys in its index, on the meta device."""


@dataclass(frozen=True)
class Format:
    """How weights are written."""

    pattern: str
    index: str
    save: Callable[[dict[str, Tensor], Path], None]


SAFETENSORS = Format(
    SAFE_WEIGHTS_PATTERN_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    lambda tensors, path: write_whole_tensors(tensors, {}, path),
)
PICKLE = Format(WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME, torch.save)


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
    if remove_checkpoint_dir:
        _refuse_losing(Path(checkpoint_dir).resolve(), Path(output_path).resolve())
    joined = dist.is_available() and dist.is_initialized()
    if not joined or dist.get_rank() == 0:
        _merge(Path(checkpoint_dir), Path(output_path), SAFETENSORS if safe_serialization else PICKLE)
        if remove_checkpoint_dir:
            shutil.rmtree(checkpoint_dir)
    if joined:
        dist.barrier()


def _refuse_losing(source: Path, target: Path) -> None:
    if target == source or source in target.parents:
        reason = "the result would be removed together with the checkpoint"
        raise wrong_value("output_path", str(target), reason, "Choose a folder outside the checkpoint")


def _merge(source: Path, target: Path, form: Format, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    index, keys = _read_index(_find(source))
    tensors = {name: stored for name, key in keys.items() if (stored := index.stored(key)) is not None}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=form.pattern,
        max_shard_size=shard_bytes,
    )
    files = split.filename_to_tensors
    expect(sum(tensor.nbytes for tensor in tensors.values()))
    target.mkdir(parents=True, exist_ok=True)
    with replace_files([target / file for file in files]) as temporary:
        for names, path in zip(files.values(), temporary, strict=True):
            form.save(_load(index, {keys[name]: tensors[name] for name in names}), path)
            advance(sum(tensors[name].nbytes for name in names))
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        content = {"metadata": split.metadata, "weight_map": weight_map}
        with replace_files([target / form.index]) as (path,):
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _find(source: Path) -> Path:
    candidates = (source, source / f"{FSDP_MODEL_NAME}_0")
    folder = next((path for path in candidates if os.path.isfile(path / shard_index.NAME)), None)
    if folder is None:
        reason = f"this is no folder with a sharded checkpoint: it has no file {shard_index.NAME}"
        fix = "Name the folder with the model's shards"
        raise wrong_value("checkpoint_directory", str(source), reason, fix)
    return folder


def _read_index(folder: Path) -> tuple[ShardIndex, dict[str, KeyPath]]:
    """Read which tensors a checkpoint has: name in the result -> key in the index."""
    index = shard_index.read(folder, MODEL)
    keys = {_name(key): key for key in index.paths if index.stored(key) is not None}
    if not keys:
        reason, fix = "it holds no tensors", "Name a model's checkpoint"
        raise wrong_value("checkpoint_directory", str(folder), reason, fix)
    return index, keys


def _name(key: KeyPath) -> str:
    return ".".join(map(str, key[1:]))


def _load(index: ShardIndex, group: Tensors) -> dict[str, Tensor]:
    memory = {key: torch.empty_like(tensor, device="cpu") for key, tensor in group.items()}
    shard_files.read(index, {key: whole(tensor) for key, tensor in memory.items()}, {})
    return {_name(key): tensor for key, tensor in memory.items()}
