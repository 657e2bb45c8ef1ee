"""The indices of folders of weights: which file holds which tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accelerate.base import CheckpointError, describe, like, listed, refuse_outside, replace_files

INDEX = "index.json"
Folder = str | os.PathLike[str]
Index = dict[str, dict[str, Any]]
"""Weight by name -> `dtype` and `shape` of its raw file, or `safetensors_file` and `weight_name`."""


def save_offload_index(index: Index, offload_folder: Folder) -> None:
    """Write the index of a folder; entries that were there stay, unless there are new ones of their names.

    Args:
        index: entries; without any, nothing is written.
        offload_folder: the folder.

    Raises:
        CheckpointError: it cannot be written, or the one that is there cannot be read.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX
    entries = {**(read_index(path) if path.is_file() else {}), **index}
    try:
        with replace_files([path]) as (temporary,):
            temporary.write_text(json.dumps(entries, indent=2), encoding="utf-8")
    except OSError as error:
        raise like(CheckpointError(f"{path} could not be written: {error}"), error) from error


def read_index(path: Path) -> Index:
    """Read the index of a folder; a file that is damaged or names one outside the folder is refused."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no index of weights: it holds a {type(content).__name__}.")
    broken = [name for name, entry in content.items() if _is_broken(entry)]
    if broken:
        raise CheckpointError(
            f"{path} is damaged: {listed(broken)} without dtype and shape, and without safetensors_file. "
            "Load the model again, which writes it anew."
        )
    for name, entry in content.items():
        if "safetensors_file" not in entry and (reason := refuse_outside(f"{name}.dat")):
            raise CheckpointError(f"{path} names the weight {name!r}, and the name of its file {reason}.")
    return content


def _is_broken(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return True
    if "safetensors_file" in entry:
        file = entry["safetensors_file"]
        texts = (file, entry.get("weight_name", ""), entry.get("dtype", ""))
        return not all(isinstance(text, str) for text in texts) or "\0" in file
    shape = entry.get("shape")
    return not (isinstance(entry.get("dtype"), str) and isinstance(shape, list) and all(map(_is_size, shape)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor of a model whose weights are in several files, by its index at `path`.

    The names are under `weight_map` in the index, or it is itself such a dictionary; files that are not in
    its folder are refused.
    """
    content = _read_json(path)
    weight_map = content.get("weight_map", content or None) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{path} is no index of weights: it holds no dictionary 'weight_map', and is no such dictionary "
            "itself."
        )
    for name, file in weight_map.items():
        if reason := refuse_outside(file):
            raise CheckpointError(
                f"{path} says that {name!r} is stored in {file!r}, which {reason}. Each file must be in the "
                "folder of the index."
            )
    return weight_map


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        text = f"{path} cannot be read as an index of weights: {describe(error)}"
        raise like(CheckpointError(text), error) from error


def make_folder(folder: Folder) -> None:
    """Make the folder of the weights, and those around it, before anything else is done."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be a folder for weights: {error}") from error
