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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
from accelerate.checkpointing import Place, ShardIndex, shard_files, shard_index, whole
from accelerate.weights import write_whole_tensors

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest file written, and with it the memory that is taken; a larger tensor is a file of its own."""

MODEL_KEY = "model"


@dataclass(frozen=True)
class Piece:
    """One tensor of a sharded checkpoint.

    Attributes:
        place: in the checkpoint.
        name: its name in the model.
        shape: of the whole tensor.
        dtype: its number format.
    """

    place: Place
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
    found, pieces = _read_pieces(folder)
    groups = list(_grouped(pieces, shard_bytes))
    expect(sum(piece.nbytes for piece in pieces))
    target.mkdir(parents=True, exist_ok=True)
    names = [_file_name(form, number, len(groups)) for number in range(1, len(groups) + 1)]
    with replace_files([target / name for name in names]) as temporary:
        for group, path in zip(groups, temporary, strict=True):
            form.save(_load(found, group), path)
            advance(sum(piece.nbytes for piece in group))
    if len(groups) > 1:
        _write_index(target / form.index, dict(zip(names, groups, strict=True)))


def _find(source: Path) -> Path:
    candidates = (source, source / f"{FSDP_MODEL_NAME}_0")
    found = next((path for path in candidates if os.path.isfile(path / shard_index.NAME)), None)
    if found is None:
        reason = f"this is no folder with a sharded checkpoint: it has no file {shard_index.NAME}"
        raise wrong_value(
            "checkpoint_directory", str(source), reason, "Name the folder with the model's shards"
        )
    return found


def _read_pieces(folder: Path) -> tuple[ShardIndex, list[Piece]]:
    """All tensors of a checkpoint, without reading any.

    Raises:
        ConfigurationError: there is none.
        CheckpointError: the metadata is damaged.
    """
    found = shard_index.read(folder, MODEL_KEY)
    entries = {place: found.metadata.state_dict_metadata[key] for place, key in found.places.items()}
    pieces = [
        Piece(place, ".".join(map(str, place[1:])), tuple(entry.size), entry.properties.dtype)
        for place, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    ]
    if not pieces:
        raise wrong_value(
            "checkpoint_directory", str(folder), "it holds no tensors", "Name a model's checkpoint"
        )
    return found, pieces


def _grouped(pieces: list[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    for piece in pieces:
        if group and sum(held.nbytes for held in group) + piece.nbytes > shard_bytes:
            yield group
            group = []
        group.append(piece)
    yield group


def _load(found: ShardIndex, group: list[Piece]) -> dict[str, torch.Tensor]:
    tensors = {piece.name: torch.empty(piece.shape, dtype=piece.dtype) for piece in group}
    shard_files.read(found, {piece.place: whole(tensors[piece.name]) for piece in group}, {})
    return tensors


def _file_name(form: Format, number: int, count: int) -> str:
    return form.pattern.format(suffix=f"-{number:05d}-of-{count:05d}" if count > 1 else "")


def _write_index(path: Path, files: Mapping[str, list[Piece]]) -> None:
    total = sum(piece.nbytes for group in files.values() for piece in group)
    places = {piece.name: name for name, group in files.items() for piece in group}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    with replace_files([path]) as (temporary,):
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
