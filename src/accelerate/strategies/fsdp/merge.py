"""A sharded checkpoint -> files of whole weights, a few gigabytes at a time."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate.base.constants import (
    FSDP_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accelerate.base.errors import wrong_value

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest file written, and with it the memory that is taken; a larger tensor is a file of its own."""

CATALOGUE = ".metadata"
"""The file by which torch.distributed.checkpoint knows its folders."""

MODEL_KEY = "model"


@dataclass(frozen=True)
class Piece:
    """One tensor of a sharded checkpoint.

    Attributes:
        stored: its name in the checkpoint.
        name: its name in the model.
        shape: of the whole tensor.
        dtype: its number format.
    """

    stored: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """How weights are written.

    Attributes:
        pattern: name of a file; ``{suffix}`` numbers it.
        index: name of the file that says which tensor is where.
        save: writes tensors by name to a path.
    """

    pattern: str
    index: str
    save: Callable[[dict[str, torch.Tensor], Path], None]


def _save_safely(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


SAFETENSORS = Format(SAFE_WEIGHTS_PATTERN_NAME, SAFE_WEIGHTS_INDEX_NAME, _save_safely)
PICKLE = Format(WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME, torch.save)


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
    groups = list(_grouped(_read_catalogue(folder), shard_bytes))
    target.mkdir(parents=True, exist_ok=True)
    names = [_file_name(form, number, len(groups)) for number in range(1, len(groups) + 1)]
    unfinished = [target / f".{name}.part" for name in names]
    try:
        for group, path in zip(groups, unfinished, strict=True):
            form.save(_load(folder, group), path)
        for path, name in zip(unfinished, names, strict=True):
            os.replace(path, target / name)
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)
    if len(groups) > 1:
        _write_index(target / form.index, dict(zip(names, groups, strict=True)))


def _find(source: Path) -> Path:
    candidates = (source, source / f"{FSDP_MODEL_NAME}_0")
    found = next((path for path in candidates if (path / CATALOGUE).is_file()), None)
    if found is None:
        reason = f"this is no folder with a sharded checkpoint: it has no file {CATALOGUE}"
        raise wrong_value(
            "checkpoint_directory", str(source), reason, "Name the folder with the model's shards"
        )
    return found


def _read_catalogue(folder: Path) -> list[Piece]:
    """All tensors of a checkpoint, without reading any.

    Raises:
        ConfigurationError: there is none.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata()
    entries = metadata.state_dict_metadata
    stored = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    names = _names_in_model(list(stored), metadata.planner_data or {})
    if not stored:
        raise wrong_value(
            "checkpoint_directory", str(folder), "it holds no tensors", "Name a model's checkpoint"
        )
    return [
        Piece(key, names[key], tuple(entry.size), entry.properties.dtype) for key, entry in stored.items()
    ]


def _names_in_model(keys: list[str], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Take off the key under which a state dict was put into the checkpoint, if it was."""
    nested = all(len(paths.get(key, ())) > 1 and paths[key][0] == MODEL_KEY for key in keys)
    return {key: ".".join(map(str, paths[key][1:])) if nested else key for key in keys}


def _grouped(pieces: list[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    for piece in pieces:
        if group and sum(held.nbytes for held in group) + piece.nbytes > shard_bytes:
            yield group
            group = []
        group.append(piece)
    yield group


def _load(folder: Path, group: list[Piece]) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors = {piece.stored: torch.empty(piece.shape, dtype=piece.dtype) for piece in group}
    with warnings.catch_warnings():  # torch warns of one process although `no_dist` asks for it
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return {piece.name: tensors[piece.stored] for piece in group}


def _file_name(form: Format, number: int, count: int) -> str:
    return form.pattern.format(suffix=f"-{number:05d}-of-{count:05d}" if count > 1 else "")


def _write_index(path: Path, files: Mapping[str, list[Piece]]) -> None:
    total = sum(piece.nbytes for group in files.values() for piece in group)
    places = {piece.name: name for name, group in files.items() for piece in group}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
