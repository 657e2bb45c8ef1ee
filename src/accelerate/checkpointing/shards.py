"""A model's weights in files of limited size, with an index where there are several."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from accelerate.base.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accelerate.base.errors import CheckpointError, wrong_value
from accelerate.base.text import describe, listed
from accelerate.weights.files import clean_state_dict_for_safetensors, write

_FILES_OF_A_FOLDER = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
"""What is looked for in a folder, in this order."""


def save_sharded(
    state: Mapping[str, Tensor], folder: Path, max_shard_size: int | str = "10GB", safe: bool = True
) -> list[Path]:
    """Write weights to a folder, and remove weights that an earlier call has left there.

    New files appear when they are whole; the index comes last.

    Args:
        state: tensors by name.
        folder: made where it does not exist.
        max_shard_size: bytes of a file, also as text such as "5GB"; a larger tensor is a file of its own.
        safe: whether safetensors is written.

    Returns:
        The files with weights.

    Raises:
        ConfigurationError: the folder is a file, or the size is none.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    if folder.is_file():
        raise wrong_value("save_directory", str(folder), "it is a file", "pass a folder")
    folder.mkdir(parents=True, exist_ok=True)
    weights = clean_state_dict_for_safetensors(state) if safe else dict(state)
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    try:
        split = split_torch_state_dict_into_shards(
            weights, filename_pattern=pattern, max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise wrong_value(
            "max_shard_size", max_shard_size, str(error), 'pass bytes or text such as "5GB"'
        ) from error
    beside = {name: folder / f".{name}.{os.getpid()}" for name in split.filename_to_tensors}
    try:
        for name, tensors in split.filename_to_tensors.items():
            write({tensor: weights[tensor] for tensor in tensors}, beside[name], safe)
        for name, path in beside.items():
            os.replace(path, folder / name)
    finally:
        for path in beside.values():
            path.unlink(missing_ok=True)
    _remove_others(folder, pattern, set(beside))
    if split.is_sharded:
        _write_index(folder / _index_of(pattern), split.metadata, split.tensor_to_filename)
    return [folder / name for name in beside]


def _index_of(pattern: str) -> str:
    return SAFE_WEIGHTS_INDEX_NAME if pattern == SAFE_WEIGHTS_PATTERN_NAME else WEIGHTS_INDEX_NAME


def _write_index(path: Path, metadata: Mapping[str, Any], places: Mapping[str, str]) -> None:
    content = {"metadata": dict(metadata), "weight_map": dict(sorted(places.items()))}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _remove_others(folder: Path, pattern: str, kept: set[str]) -> None:
    """Remove weights of the same format that are not part of the new ones."""
    own = re.compile(re.escape(pattern).replace(r"\{suffix\}", r"(-\d{5}-of-\d{5})?"))
    for path in folder.iterdir():
        if (own.fullmatch(path.name) and path.name not in kept) or path.name == _index_of(pattern):
            path.unlink()


def find_shards(checkpoint: Path) -> list[Path]:
    """Return the files that hold the weights of one model.

    Args:
        checkpoint: a file, an index of files, or a folder with either: under the names that `save_sharded`
            gives them, or with one index of any name.

    Raises:
        ConfigurationError: there is nothing of that kind.
        CheckpointError: the index is damaged, or a file that it names is missing.
    """
    if checkpoint.is_file():
        return _read_index(checkpoint) if checkpoint.name.endswith(".index.json") else [checkpoint]
    if not checkpoint.is_dir():
        raise wrong_value("checkpoint", str(checkpoint), "there is no such file or folder", "pass one")
    found = [checkpoint / name for name in _FILES_OF_A_FOLDER if (checkpoint / name).is_file()]
    found = found or sorted(checkpoint.glob("*.index.json"))
    if not found or (len(found) > 1 and found[0].name not in _FILES_OF_A_FOLDER):
        raise wrong_value(
            "checkpoint",
            str(checkpoint),
            f"the folder holds none of {', '.join(_FILES_OF_A_FOLDER)}, nor one other *.index.json",
            "pass the file with the weights, or their index",
        )
    return find_shards(found[0])


def _read_index(path: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of weights, or damaged: {describe(error)}") from error
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise CheckpointError(f"{path} names files that are not beside it: {listed(missing)}.")
    return [path.parent / name for name in names]
