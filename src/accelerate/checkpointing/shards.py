"""Weights of a model in files of limited size, with an index if there are several.

`Accelerator.save_model` writes them, and `load_checkpoint_in_model` searches for them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate.base import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
    CheckpointError,
    ConfigurationError,
    as_builtin,
    convert_file_size_to_int,
    listed,
    progress_bar,
    replace_files,
    size_of,
    wrong_value,
)
from accelerate.weights import drop_shared, read_weight_map, write_torch, write_whole_tensors

# Names of weights in a folder, in the order of the search.
_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def save_sharded(
    state: Mapping[str, Any], folder: Path, max_shard_size: int | str = "10GB", safe: bool = True
) -> list[Path]:
    """Writes weights to a folder, and removes weights of an earlier call.

    New files appear when they are complete, the index last. In safetensors a shared tensor is stored once,
    and the metadata of its file has the other names. Files of torch also contain objects other than tensors,
    all in the first file. A tensor larger than `max_shard_size` has a file of its own.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    if folder.is_file():
        raise wrong_value("save_directory", str(folder), "it is a file", "pass a folder")
    limit = _bytes_of(max_shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    weights, aliases = drop_shared(state) if safe else (_tensors_of(state), {})
    others = {name: value for name, value in state.items() if not (safe or name in weights)}
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    index = SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME
    split = split_torch_state_dict_into_shards(weights, filename_pattern=pattern, max_shard_size=limit)
    files = split.filename_to_tensors or {pattern.format(suffix=""): []}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    present, paths = size_of(folder.iterdir()), [folder / name for name in files]
    # safetensors writes to a temporary file in this folder and renames it
    progress = progress_bar("Saving a model", nbytes, lambda: size_of(folder.iterdir()) - present)
    with replace_files(paths) as temporary, progress:
        for path, tensors in zip(temporary, files.values(), strict=True):
            content = {tensor: weights[tensor] for tensor in tensors}
            if safe:
                tied = {name: first for name, first in aliases.items() if first in content}
                write_whole_tensors(content, tied, path)
            else:
                write_torch({**content, **others}, path)
                others.clear()
    own = re.compile(re.escape(pattern).replace(r"\{suffix\}", r"(-\d{5}-of-\d{5})?"))
    for path in folder.iterdir():
        if (own.fullmatch(path.name) and path.name not in files) or path.name == index:
            path.unlink()
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        text = json.dumps({"metadata": dict(split.metadata), "weight_map": weight_map}, indent=2)
        with replace_files([folder / index]) as (written,):
            written.write_text(f"{text}\n", encoding="utf-8")
    return paths


def _bytes_of(max_shard_size: int | str) -> int:
    """Returns a size in bytes, for which huggingface_hub has other units."""
    if not isinstance(max_shard_size, str):
        return max_shard_size
    try:
        return convert_file_size_to_int(max_shard_size.upper())
    except ConfigurationError as error:
        raise wrong_value(
            "max_shard_size", max_shard_size, "not a size", 'pass bytes or text such as "5GB"'
        ) from error


def _tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a state dict, whose other values do not count for the size of a file.

    torch writes the whole storage of a tensor. Therefore a view is copied unless its storage has other
    tensors here.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    dense = {name for name, tensor in tensors.items() if tensor.layout == torch.strided}
    uses = Counter(tensors[name].untyped_storage().data_ptr() for name in dense)

    def is_small_view(name: str) -> bool:
        storage = tensors[name].untyped_storage()
        return uses[storage.data_ptr()] == 1 and storage.nbytes() > tensors[name].nbytes

    return {
        name: tensor.clone() if name in dense and is_small_view(name) else tensor
        for name, tensor in tensors.items()
    }


def find_shards(checkpoint: Path) -> list[Path]:
    """Returns the files with the weights of one model.

    Args:
        checkpoint: File, index of files, or folder with either, under the names of `save_sharded`, or with
            one index of any name.
    """
    if checkpoint.is_file():
        return _read_index(checkpoint) if checkpoint.name.endswith(".index.json") else [checkpoint]
    if not checkpoint.is_dir():
        raise wrong_value("checkpoint", str(checkpoint), "there is no such file or folder", "pass one")
    paths = [checkpoint / name for name in _NAMES if (checkpoint / name).is_file()]
    paths = paths or sorted(checkpoint.glob("*.index.json"))
    if not paths or (len(paths) > 1 and paths[0].name not in _NAMES):
        reason = f"the folder holds none of {', '.join(_NAMES)}, nor one other *.index.json"
        fix = "pass the file with the weights, or their index"
        raise wrong_value("checkpoint", str(checkpoint), reason, fix)
    return find_shards(paths[0])


def _read_index(path: Path) -> list[Path]:
    paths = [path.parent / name for name in sorted(set(read_weight_map(path).values()))]
    if missing := [shard.name for shard in paths if not shard.is_file()]:
        error = CheckpointError(f"{path} names files that are not beside it: {listed(missing)}.")
        raise as_builtin(error, FileNotFoundError)
    return paths
