"""Weights that stay in files until they are used: raw files with an index, or files of safetensors."""

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
from accelerate.weights.files import MappedFile
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
    broken = [name for name, entry in content.items() if not isinstance(entry, dict) or _is_broken(entry)]
    if broken:
        raise CheckpointError(
            f"{path} is damaged: {listed(broken)} without dtype and shape, and without safetensors_file. "
            "Load the model again, which writes it anew."
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
    return not (isinstance(entry.get("dtype"), str) and isinstance(shape, list) and all(map(_is_size, shape)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor by the index at `path`: its `weight_map`, or the index as a whole.

    Files that are not in its folder are refused.
    """
    content = _read_json(path)
    weight_map = content.get("weight_map", content or None) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        text = "it holds no dictionary 'weight_map', and is no such dictionary itself"
        raise CheckpointError(f"{path} is no index of weights: {text}.")
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


WRITTEN = "written"
"""Key of an entry, in memory only: when its file was written."""
SCALES = "SCB"
"""Last part of the name under which the scales of a weight in 8 bits are stored."""


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: Folder, index: Index | None = None
) -> Index | None:
    """Write a tensor to its own file.

    Args:
        weight: the tensor, on any device.
        weight_name: its name, which the file has, too.
        offload_folder: made where it does not exist.
        index: gets the entry with which the tensor is read back.

    Returns:
        The index; None if none was given.

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
    """Return a tensor that `offload_weight` wrote, mapped from the file; changes do not reach that.

    Args:
        weight_file: the file.
        weight_info: its entry in the index.

    Raises:
        CheckpointError: the file is missing, too short, or not the one that `add_write_times` saw.
    """
    path, dtype = Path(weight_file), read_dtype(weight_info["dtype"])
    shape = torch.Size(weight_info["shape"])
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    size = shape.numel() * dtype.itemsize
    if not path.is_file():
        error = CheckpointError(f"{path} is missing. Load the model again, which writes it anew.")
        raise as_builtin(error, FileNotFoundError)
    status = path.stat()
    if weight_info.get(WRITTEN, status.st_mtime_ns) != status.st_mtime_ns:
        raise CheckpointError(
            f"{path} was written again after the model was dispatched: another one has its weights there. "
            "Give each model a folder of its own."
        )
    if status.st_size < size:
        reason = f"has {status.st_size} bytes instead of {size}: it is cut off"
        error = CheckpointError(f"{path} {reason}. Load the model again, which writes it anew.")
        raise as_builtin(error, ValueError)
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(dtype).reshape(shape)


def add_write_times(index: Index, folder: Folder) -> Index:
    """Return entries with the times at which their raw files were written: readers notice a new file."""
    paths = {name: Path(folder) / f"{name}.dat" for name in index if "safetensors_file" not in index[name]}
    times = {name: {WRITTEN: path.stat().st_mtime_ns} for name, path in paths.items() if path.is_file()}
    return {name: {**entry, **times.get(name, {})} for name, entry in index.items()}


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, Tensor]) -> None:
    """Write tensors to a file each, and their index.

    Args:
        save_dir: made where it does not exist.
        state_dict: tensors by name.

    Raises:
        CheckpointError: something cannot be written.
    """
    make_folder(save_dir)
    index: Index = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(model: nn.Module, index: Index, offload_folder: Folder) -> None:
    """Load weights of a model from their files to the CPU.

    Args:
        model: the module.
        index: entries of the weights that are meant; without any, nothing happens.
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
    """Return the name of another tensor of the same module: of "a.weight" and "bias" it is "a.bias"."""
    path = name.rpartition(".")[0]
    return f"{path}.{last}" if path else last


def scales_name(name: str) -> str:
    """Return the name under which the scales of a weight in 8 bits are stored; "" for other tensors."""
    return sibling_name(name, SCALES) if name == sibling_name(name, "weight") else ""


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights by name, some in memory and some in files, which are read when they are used.

    Args:
        state_dict: those in memory.
        save_folder: folder with raw files; None when the index names files of safetensors only.
        index: entries of those in files; None reads it from the folder.
        device: where weights from files of safetensors are read to; None is the CPU.

    Raises:
        ConfigurationError: none of them is given.
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
                "OffloadedWeightsLoader() holds no weights: pass state_dict, save_folder or index."
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
            raise ConfigurationError(f"{key} is stored in a file of its own, and no save_folder was given.")
        return load_offloaded_weight(Path(self.save_folder) / f"{key}.dat", entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def open_files(self) -> OffloadedWeightsLoader:
        """Open the files of safetensors now, so that these are read, even if others replace them."""
        for entry in self.index.values():
            if "safetensors_file" in entry:
                self._open(str(entry["safetensors_file"]))
        return self

    def _open(self, path: str) -> MappedFile:
        if path not in self._mapped:
            self._mapped[path] = MappedFile(Path(path))
        return self._mapped[path]


class PrefixedDataset(Mapping[str, Tensor]):
    """The weights of one module among those of a model, under their names in that module.

    Iterating yields the names in the model, as clients expect; both kinds of names find their weights.

    Args:
        dataset: weights of the model by name.
        prefix: what the names of the module's weights begin with.
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
    """Return the entries of some modules out of those of a model.

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
    """Write a weight in 8 bits, and its scales, to files; the model keeps its parameter without a value.

    Args:
        model: the module.
        param: the weight, in 8 bits if it comes with scales.
        param_name: its name in the model.
        new_dtype: dtype of a parameter that is not one of bitsandbytes' and stays as it is; None keeps its.
        offload_folder: where files go.
        offload_index: gets the entries with which they are read back.
        fp16_statistics: the scales of a weight in 8 bits; None if it is not quantized yet.

    Raises:
        MissingPackageError: the weight is to be quantized, and bitsandbytes is not installed.
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
    """Return a matrix in 8 bits and the scale of each row, as bitsandbytes computes them."""
    require("bitsandbytes", "Quantizing a weight to 8 bits")
    from bitsandbytes.functional import int8_vectorwise_quant

    quantized, scales, _ = int8_vectorwise_quant(weight.detach().to(torch.float16).contiguous())
    return quantized, scales
