"""The index of a folder of weights: which file holds which tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accelerate.base.errors import CheckpointError
from accelerate.base.text import listed

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
    unfinished = path.with_name(f".{INDEX}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(entries, indent=2), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def read_index(path: Path) -> Index:
    """Read the index of a folder.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as an index of weights: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no index of weights: it holds a {type(content).__name__}.")
    broken = [name for name, entry in content.items() if _is_broken(entry)]
    if broken:
        raise CheckpointError(
            f"{path} is damaged: {listed(broken)} without dtype and shape, and without safetensors_file. "
            "Load the model again, which writes it anew."
        )
    return content


def _is_broken(entry: Any) -> bool:
    keys = entry.keys() if isinstance(entry, dict) else ()
    return "safetensors_file" not in keys and not {"dtype", "shape"}.issubset(keys)


def make_folder(folder: Folder) -> None:
    """Make the folder where weights go, before anything else is done.

    Args:
        folder: with those around it; it may be there.

    Raises:
        CheckpointError: that cannot be.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be a folder for weights: {error}") from error
