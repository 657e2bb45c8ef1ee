"""Weights of a model in files of limited size, with an index if there are several.

`Accelerator.save_model` writes them, and `load_checkpoint_in_model` searches for them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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


class FilePlan(NamedTuple):
    """Files of the weights of a model.

    Attributes:
        files: Names of the tensors by the name of their file, in the order of the files.
        metadata: Metadata of the index, or None without an index.
    """

    files: dict[str, list[str]]
    pattern: str
    index_name: str
    metadata: dict[str, Any] | None


def plan_files(weights: Mapping[str, Tensor], max_shard_size: int | str, safe: bool) -> FilePlan:
    """Returns the files of weights, which may be on the meta device.

    A tensor larger than `max_shard_size` has a file of its own.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    limit = read_size("max_shard_size", max_shard_size)
    split = split_torch_state_dict_into_shards(dict(weights), filename_pattern=pattern, max_shard_size=limit)
    return FilePlan(
        split.filename_to_tensors or {pattern.format(suffix=""): []},
        pattern,
        SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME,
        dict(split.metadata) if split.is_sharded else None,
    )


def save_sharded(
    state: Mapping[str, Any], folder: Path, max_shard_size: int | str = "10GB", safe: bool = True
) -> list[Path]:
    """Writes weights to a folder, and removes weights of an earlier call.

    New files appear when they are complete, the index last. In safetensors a shared tensor is stored once,
    and the metadata of its file has the other names. Files of torch also contain objects other than tensors,
    all in the first file.
    """
    weights, aliases = drop_shared(state) if safe else (_tensors_of(state), {})
    others = {name: value for name, value in state.items() if not (safe or name in weights)}
    plan = plan_files(weights, max_shard_size, safe)
    contents = ({name: weights[name] for name in names} for names in plan.files.values())
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    return write_files(plan, contents, folder, nbytes, aliases=aliases, others=others)


def save_from_shards(
    state: Mapping[str, Any],
    gather: Callable[[Any], Tensor],
    folder: Path,
    max_shard_size: int | str = "10GB",
    *,
    writes: bool,
) -> None:
    """Writes the weights of a sharded model to safetensors files, and gathers one file at a time.

    Called on all ranks. A rank that cannot write its files takes part in all collectives before it raises.

    Args:
        state: State dict of tensors that may be sharded, with one tensor for all of its names.
        gather: Returns a whole tensor on the CPU, and is called on all ranks in the same order.
        max_shard_size: Size of a file in bytes, also as a string such as "5GB".
    """
    first: dict[int, str] = {}
    aliases = {
        name: first[id(value)] for name, value in state.items() if first.setdefault(id(value), name) != name
    }
    values = {name: state[name] for name in first.values()}
    specs = {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in values.items()}
    plan = plan_files(specs, max_shard_size, safe=True)
    contents = ({name: gather(values[name]) for name in names} for names in plan.files.values())
    try:
        if writes:
            nbytes = sum(spec.nbytes for spec in specs.values())
            write_files(plan, contents, folder, nbytes, aliases=aliases)
    except Exception:
        _take_all(contents)
        raise
    _take_all(contents)


def _take_all(contents: Iterable[Any]) -> None:
    for _ in contents:
        pass


def write_files(
    plan: FilePlan,
    contents: Iterable[dict[str, Tensor]],
    folder: Path,
    nbytes: int,
    task: str = "Saving a model",
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
    others: Mapping[str, Any] = MappingProxyType({}),
) -> list[Path]:
    """Writes the files of a plan, and removes other weights of the same format from the folder.

    Args:
        contents: Tensors of each file, which are read when the file is written.
        nbytes: Size of all tensors, for the progress bar of the task.
        aliases: Other names of tensors in safetensors files, with the names of these tensors.
        others: Objects that are not tensors, for the first file of torch.
    """
    if folder.is_file():
        raise wrong_value("save_directory", str(folder), "it is a file", "pass a folder")
    folder.mkdir(parents=True, exist_ok=True)
    safe = plan.index_name == SAFE_WEIGHTS_INDEX_NAME
    present, paths = size_of(folder.iterdir()), [folder / name for name in plan.files]
    # safetensors writes to a temporary file in this folder and renames it
    progress = progress_bar(task, nbytes, lambda: size_of(folder.iterdir()) - present)
    with replace_files(paths) as temporary, progress:
        for path, content in zip(temporary, contents, strict=True):
            if safe:
                tied = {name: first for name, first in aliases.items() if first in content}
                write_whole_tensors(content, tied, path)
            else:
                write_torch({**content, **(others if path == temporary[0] else {})}, path)
            content.clear()  # before the next file is gathered
    own = re.compile(re.escape(plan.pattern).replace(r"\{suffix\}", r"(-\d{5}-of-\d{5})?"))
    for path in folder.iterdir():
        if (own.fullmatch(path.name) and path.name not in plan.files) or path.name == plan.index_name:
            path.unlink()
    if plan.metadata is not None:
        weight_map = {name: file for file, names in plan.files.items() for name in names}
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(weight_map.items()))}
        with replace_files([folder / plan.index_name]) as (written,):
            written.write_text(f"{json.dumps(index, indent=2)}\n", encoding="utf-8")
    return paths


def read_size(name: str, size: int | str) -> int:
    """Returns the size of an argument in bytes, for which huggingface_hub has other units."""
    if not isinstance(size, str):
        return size
    try:
        return convert_file_size_to_int(size.upper())
    except ConfigurationError as error:
        raise wrong_value(name, size, "not a size", 'pass bytes or text such as "5GB"') from error


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
