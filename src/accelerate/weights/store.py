"""Offloaded weights, which stay in raw files with an index or in safetensors files until they are used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import (
    CheckpointError,
    ConfigurationError,
    as_builtin,
    describe,
    like,
    listed,
    refuse_outside,
    replace_files,
    require,
)
from accelerate.weights.opened import MappedFile
from accelerate.weights.placement import (
    Device,
    find_owner,
    read_dtype,
    resolve_device,
    set_module_tensor_to_device,
)

INDEX = "index.json"
Folder = str | os.PathLike[str]
Index = dict[str, dict[str, Any]]
"""Weight by name -> `dtype` and `shape` of its raw file, or `safetensors_file` and `weight_name`."""


def save_offload_index(index: Index, offload_folder: Folder) -> None:
    """Writes the index of a folder, and keeps existing entries with other names.

    Args:
        index: new entries. Nothing is written without entries.
        offload_folder: the folder.

    Raises:
        CheckpointError: the index cannot be written, or the existing one cannot be read.
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
    """Reads the index of a folder.

    A damaged file, or one that names a file outside the folder, raises an error.
    """
    content = _read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not an index of weights: it holds a {type(content).__name__}.")
    broken = [name for name, entry in content.items() if not isinstance(entry, dict) or _is_broken(entry)]
    if broken:
        raise CheckpointError(
            f"{path} is damaged: {listed(broken)} without dtype and shape, and without safetensors_file. "
            "Load the model again, which rewrites it."
        )
    for name, entry in content.items():
        if "safetensors_file" not in entry and (reason := refuse_outside(f"{name}.dat")):
            raise CheckpointError(f"{path} names the weight {name!r}, and the name of its file {reason}.")
    return content


def _is_broken(entry: dict[str, Any]) -> bool:
    if "safetensors_file" in entry:
        file = entry["safetensors_file"]
        texts = (file, entry.get("weight_name", ""), entry.get("dtype", ""))
        return not all(isinstance(text, str) for text in texts) or "\0" in file
    shape = entry.get("shape")
    if not isinstance(entry.get("dtype"), str) or not isinstance(shape, list):
        return True
    return any(type(size) is not int or size < 0 for size in shape)


def read_weight_map(path: Path) -> dict[str, str]:
    """Returns the file of each tensor from the `weight_map` of an index, or from the index itself.

    Files outside of the folder of the index raise an error.
    """
    content = _read_json(path)
    weight_map = content.get("weight_map", content or None) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        text = "it holds no dictionary 'weight_map', and is not such a dictionary itself"
        raise CheckpointError(f"{path} is not an index of weights: {text}.")
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
    """Creates the folder of the weights and its parents."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be a folder for weights: {error}") from error


WRITTEN = "written"
"""Key of an entry with the write time of its file, which is not saved."""
SCALES = "SCB"
"""Last part of the name of the scales of a weight in 8 bits."""


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: Folder, index: Index | None = None
) -> Index | None:
    """Writes a tensor to a raw file.

    Args:
        weight: the tensor, on any device.
        weight_name: its name, and that of the file.
        offload_folder: created if it does not exist.
        index: receives the entry that `load_offloaded_weight` requires.

    Returns:
        The index, or None if none is passed.

    Raises:
        CheckpointError: the file cannot be written, or there are no values.
    """
    if weight.is_meta:
        raise CheckpointError(
            f"{weight_name} has no values to write: it is on the meta device. Load it first."
        )
    tensor = weight.detach().cpu().contiguous()
    path = Path(offload_folder) / f"{weight_name}.dat"
    content = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"\0"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_files([path], sync=False) as (temporary,):  # the old file may be mapped into memory
            temporary.write_bytes(content)
    except OSError as error:
        raise like(CheckpointError(f"{path} could not be written: {error}"), error) from error
    if index is not None:
        index[weight_name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> Tensor:
    """Returns a tensor written by `offload_weight`, mapped from its file.

    Changes of the tensor do not reach the file.

    Args:
        weight_file: the file.
        weight_info: its entry in the index.

    Raises:
        CheckpointError: the file is missing, too short, or newer than its entry from `add_write_times`.
    """
    path, dtype = Path(weight_file), read_dtype(weight_info["dtype"])
    shape = torch.Size(weight_info["shape"])
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    size = shape.numel() * dtype.itemsize
    if not path.is_file():
        error = CheckpointError(f"{path} is missing. Load the model again, which rewrites it.")
        raise as_builtin(error, FileNotFoundError)
    status = path.stat()
    if weight_info.get(WRITTEN, status.st_mtime_ns) != status.st_mtime_ns:
        raise CheckpointError(
            f"{path} was written again after the model was dispatched: another model has its weights there. "
            "Use a separate folder for each model."
        )
    if status.st_size < size:
        reason = f"has {status.st_size} bytes instead of {size}: it is truncated"
        error = CheckpointError(f"{path} {reason}. Load the model again, which rewrites it.")
        raise as_builtin(error, ValueError)
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(dtype).reshape(shape)


def add_write_times(index: Index, folder: Folder) -> Index:
    """Adds the write times of raw files to entries, so that readers detect a changed file."""
    paths = {name: Path(folder) / f"{name}.dat" for name in index if "safetensors_file" not in index[name]}
    times = {name: {WRITTEN: path.stat().st_mtime_ns} for name, path in paths.items() if path.is_file()}
    return {name: {**entry, **times.get(name, {})} for name, entry in index.items()}


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, Tensor]) -> None:
    """Writes each tensor to a raw file, and writes their index.

    Args:
        save_dir: created if it does not exist.
        state_dict: tensors by name.

    Raises:
        CheckpointError: a file cannot be written.
    """
    make_folder(save_dir)
    index: Index = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(model: nn.Module, index: Index, offload_folder: Folder) -> None:
    """Loads weights of a model from raw files to the CPU.

    Args:
        model: the module.
        index: entries of the weights to load.
        offload_folder: the folder with the files.
    """
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        if name.endswith(SCALES):
            continue
        weight = weights[name]
        scales = weights.get(scales_name(name))
        dtype = weight.dtype if scales is not None else None
        set_module_tensor_to_device(model, name, "cpu", weight, dtype, fp16_statistics=scales)


def sibling_name(name: str, last: str) -> str:
    """Returns the name of another tensor of the same module, as "a.bias" from "a.weight" and "bias"."""
    path = name.rpartition(".")[0]
    return f"{path}.{last}" if path else last


def scales_name(name: str) -> str:
    """Returns the name of the scales of a weight in 8 bits, or "" for other tensors."""
    return sibling_name(name, SCALES) if name == sibling_name(name, "weight") else ""


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Mapping of weights by name, some in memory and some in files that are read on access.

    Args:
        state_dict: weights in memory.
        save_folder: folder with raw files. None if the index names safetensors files only.
        index: entries of the weights in files. None reads the index of the folder.
        device: device of weights from safetensors files. None is the CPU.

    Raises:
        ConfigurationError: none of the first three is passed.
        CheckpointError: the index cannot be read.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Index | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError(
                "OffloadedWeightsLoader() has no weights: pass state_dict, save_folder or index."
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_index(Path(save_folder) / INDEX)
        self.index: Index = index
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self.device = device
        self._mapped: dict[str, MappedFile] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __getitem__(self, key: str) -> Tensor:
        in_memory = self.state_dict.get(key)
        if in_memory is not None:
            return in_memory
        entry = self.index[key]
        if "safetensors_file" in entry:
            tensor = self._open(str(entry["safetensors_file"])).read(entry.get("weight_name", key))
            dtype = read_dtype(entry["dtype"]) if "dtype" in entry else tensor.dtype
            return tensor.to("cpu" if self.device is None else resolve_device(self.device), dtype)
        if self.save_folder is None:
            raise ConfigurationError(f"{key} is stored in a raw file, and no save_folder was passed.")
        return load_offloaded_weight(Path(self.save_folder) / f"{key}.dat", entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def open_files(self) -> OffloadedWeightsLoader:
        """Opens the safetensors files, so that these are read even if others replace them."""
        for entry in self.index.values():
            if "safetensors_file" in entry:
                self._open(str(entry["safetensors_file"]))
        return self

    def _open(self, path: str) -> MappedFile:
        if path not in self._mapped:
            self._mapped[path] = MappedFile(Path(path))
        return self._mapped[path]


class PrefixedDataset(Mapping[str, Tensor]):
    """Mapping of the weights of one module under their names in that module.

    Iteration yields the names in the model, as clients expect. Both kinds of names find their weights.

    Args:
        dataset: weights of the model by name.
        prefix: prefix of the names of the weights of the module.
    """

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        try:
            return self.dataset[f"{self.prefix}{key}"]
        except KeyError:
            if not key.startswith(self.prefix):
                raise
            return self.dataset[key]

    def __contains__(self, key: object) -> bool:
        is_full = isinstance(key, str) and key.startswith(self.prefix) and key in self.dataset
        return is_full or f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def extract_submodules_state_dict(
    state_dict: Mapping[str, Any], submodule_names: Iterable[str]
) -> dict[str, Any]:
    """Returns the entries of some submodules of a state dict.

    Args:
        state_dict: values by dotted name.
        submodule_names: names of modules, or of single entries.
    """
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }


def quantize_and_offload_8bit(
    model: nn.Module,
    param: Tensor,
    param_name: str,
    new_dtype: str | torch.dtype | None,
    offload_folder: Folder,
    offload_index: Index,
    fp16_statistics: Tensor | None,
) -> None:
    """Writes a weight in 8 bits and its scales to files, and moves the parameter to the meta device.

    Args:
        model: the module.
        param: the weight, in 8 bits if scales are passed.
        param_name: its name in the model.
        new_dtype: dtype of a parameter that is not quantized. None keeps its dtype.
        offload_folder: folder of the files.
        offload_index: receives the entries of the files.
        fp16_statistics: the scales of a weight in 8 bits. None if it is not yet quantized.

    Raises:
        MissingPackageError: the weight must be quantized, and bitsandbytes is not installed.
    """
    owner, name = find_owner(model, param_name)
    if fp16_statistics is None and type(getattr(owner, name)).__name__ == "Int8Params":
        param, fp16_statistics = quantize_rows(param)
    elif fp16_statistics is None and new_dtype is not None:
        param = param.to(read_dtype(new_dtype))
    offload_weight(param, param_name, offload_folder, offload_index)
    if fp16_statistics is not None:
        offload_weight(fp16_statistics, sibling_name(param_name, SCALES), offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, "meta", param.to("meta"), param.dtype)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a matrix in 8 bits and the scale of each row, computed by bitsandbytes."""
    require("bitsandbytes", "Quantizing a weight to 8 bits")
    from bitsandbytes.functional import int8_vectorwise_quant

    quantized, scales, _ = int8_vectorwise_quant(weight.detach().to(torch.float16).contiguous())
    return quantized, scales
