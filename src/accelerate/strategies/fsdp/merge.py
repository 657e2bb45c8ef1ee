"""A sharded checkpoint -> files of whole weights, a few gigabytes at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
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
from accelerate.checkpointing import MODEL, Place, ShardIndex, shard_files, shard_index, whole
from accelerate.weights import write_whole_tensors

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest file written, and with it the memory that is taken; a larger tensor is a file of its own."""

Tensors = dict[Place, Tensor]
"""Tensors of a sharded checkpoint by their places in it, on the meta device."""


@dataclass(frozen=True)
class Format:
    """How weights are written."""

    pattern: str
    index: str
    save: Callable[[dict[str, Tensor], Path], None]


def _save_safely(tensors: dict[str, Tensor], path: Path) -> None:
    write_whole_tensors(tensors, {}, path)


SAFETENSORS = Format(SAFE_WEIGHTS_PATTERN_NAME, SAFE_WEIGHTS_INDEX_NAME, _save_safely)
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
    folder = _find(source)
    index, tensors = _read_tensors(folder)
    groups = list(_grouped(tensors, shard_bytes))
    expect(_bytes_of(tensors))
    target.mkdir(parents=True, exist_ok=True)
    names = [_file_name(form, number, len(groups)) for number in range(1, len(groups) + 1)]
    with replace_files([target / name for name in names]) as temporary:
        for group, path in zip(groups, temporary, strict=True):
            form.save(_load(index, group), path)
            advance(_bytes_of(group))
    if len(groups) > 1:
        _write_index(target / form.index, dict(zip(names, groups, strict=True)))


def _find(source: Path) -> Path:
    candidates = (source, source / f"{FSDP_MODEL_NAME}_0")
    folder = next((path for path in candidates if os.path.isfile(path / shard_index.NAME)), None)
    if folder is None:
        reason = f"this is no folder with a sharded checkpoint: it has no file {shard_index.NAME}"
        raise wrong_value(
            "checkpoint_directory", str(source), reason, "Name the folder with the model's shards"
        )
    return folder


def _read_tensors(folder: Path) -> tuple[ShardIndex, Tensors]:
    """Read the shapes and dtypes of all tensors of a checkpoint."""
    index = shard_index.read(folder, MODEL)
    stored = {place: index.stored(place) for place in index.places}
    tensors = {place: tensor for place, tensor in stored.items() if tensor is not None}
    if not tensors:
        raise wrong_value(
            "checkpoint_directory", str(folder), "it holds no tensors", "Name a model's checkpoint"
        )
    return index, tensors


def _grouped(tensors: Tensors, shard_bytes: int) -> Iterator[Tensors]:
    group: Tensors = {}
    for place, tensor in tensors.items():
        if group and _bytes_of(group) + tensor.nbytes > shard_bytes:
            yield group
            group = {}
        group[place] = tensor
    yield group


def _bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _name(place: Place) -> str:
    return ".".join(map(str, place[1:]))


def _load(index: ShardIndex, group: Tensors) -> dict[str, Tensor]:
    memory = {place: torch.empty_like(tensor, device="cpu") for place, tensor in group.items()}
    shard_files.read(index, {place: whole(tensor) for place, tensor in memory.items()}, {})
    return {_name(place): tensor for place, tensor in memory.items()}


def _file_name(form: Format, number: int, count: int) -> str:
    return form.pattern.format(suffix=f"-{number:05d}-of-{count:05d}" if count > 1 else "")


def _write_index(path: Path, files: Mapping[str, Tensors]) -> None:
    total = sum(map(_bytes_of, files.values()))
    places = {_name(place): name for name, group in files.items() for place in group}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    with replace_files([path]) as (temporary,):
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
