"""Files of weights, opened: names and shapes are known at once, values are read when they are asked for."""

from __future__ import annotations

import json
import mmap
import os
import weakref
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accelerate.base import CheckpointError, like
from accelerate.weights.files import read_torch
from accelerate.weights.shared import read_aliases

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Names of number formats in headers; source: https://github.com/huggingface/safetensors#format."""
LENGTH = 8
"""Bytes of the number with which a file begins: how long its header is."""


class Range(NamedTuple):
    """The bytes of a file with the values of a tensor; a dtype that torch does not have is None."""

    start: int
    end: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class MappedFile:
    """A file of safetensors whose tensors are mapped one by one, and unmapped when nothing refers to them.

    Opening the whole file would keep all pages that were ever read among those of the process. The file stays
    open, so that it is this one that is read, even if another replaces it or it is deleted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._ranges = _read_header(self._file)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            text = f"{path} cannot be read as safetensors: {error!r}"
            raise like(CheckpointError(text), error) from error

    def __reduce__(self) -> Any:
        return MappedFile, (self.path,)  # a copy opens the file by itself

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; changes do not reach the file."""
        stored = self._ranges.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path} has no tensor of the name {name}.")
        start, end, dtype, shape = stored
        if dtype is None:
            raise CheckpointError(f"{name} of {self.path} has a number format that this torch does not know.")
        if start == end:
            return torch.empty(shape, dtype=dtype)
        page = start - start % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(self._file, end - page, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be read from {self.path}: {error}") from error
        return torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=start - page).reshape(shape)


def _read_header(file: int) -> dict[str, Range]:
    size = os.fstat(file).st_size
    length = int.from_bytes(os.read(file, LENGTH), "little")
    if length > size - LENGTH:
        raise ValueError("its header is cut off")
    with open(file, "rb", closefd=False) as header_file:
        header: dict[str, Any] = json.loads(header_file.read(length))
    header.pop("__metadata__", None)
    return {name: _range_of(name, entry, LENGTH + length, size) for name, entry in header.items()}


def _range_of(name: str, entry: dict[str, Any], data: int, size: int) -> Range:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (first, last, *shape)):
        raise ValueError(f"{name} has a shape or offsets that are not sizes")
    stored = Range(data + first, data + last, DTYPES.get(entry["dtype"]), shape)
    if not data <= stored.start <= stored.end <= size:
        raise ValueError(f"{name} is cut off")
    if stored.dtype is not None and stored.end - stored.start != prod(stored.shape) * stored.dtype.itemsize:
        raise ValueError(f"{name} has not as many bytes as its shape says")
    return stored


class WeightFile:
    """A file of weights.

    Attributes:
        shapes: of all tensors, by name; further names of a tensor are among them.
        extra: names of the extra states of modules.
    """

    path: Path
    shapes: Mapping[str, torch.Size]
    extra: Collection[str]

    def read(self, name: str, device: torch.device) -> Any:
        """Return one tensor or extra state; from safetensors to the CPU it is mapped, as a private copy."""
        raise NotImplementedError

    def locate(self, name: str) -> tuple[Path, str] | None:
        """Return from which file, and under which name, a tensor can be mapped; None: it cannot."""
        return None

    def release(self) -> None:
        """Close the file until something is read again: mapped pages count as memory in use."""


class SafetensorsFile(WeightFile):
    """A file of safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: dict[str, Any] = {}
        opened = self._open(torch.device("cpu"))
        shapes = {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        self._first = read_aliases(opened.metadata(), shapes.keys(), path)
        shapes.update({name: shapes[first] for name, first in self._first.items()})
        self.extra = [name for name in shapes if is_extra(name)]
        self.shapes = {name: shape for name, shape in shapes.items() if not is_extra(name)}

    def read(self, name: str, device: torch.device) -> Tensor:
        try:
            tensor: Tensor = self._open(device).get_tensor(self._first.get(name, name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {self.path}: {error}") from error
        return tensor

    def locate(self, name: str) -> tuple[Path, str]:
        return self.path, self._first.get(name, name)

    def release(self) -> None:
        self._opened.clear()

    def _open(self, device: torch.device) -> Any:
        key = str(device)
        if key not in self._opened:
            try:
                self._opened[key] = safe_open(self.path, "pt", device=key)
            except (SafetensorError, OSError) as error:
                text = f"{self.path} cannot be read as safetensors: {error}"
                raise like(CheckpointError(text), error) from error
        return self._opened[key]


class TorchFile(WeightFile):
    """A state dict in a file of torch, of which only tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: dict[str, Any] = {}
        state = self._open()
        self.extra = [name for name in state if is_extra(name)]
        self.shapes = {name: tensor.shape for name, tensor in state.items() if not is_extra(name)}

    def read(self, name: str, device: torch.device) -> Any:
        value = self._open()[name]
        # torch.save writes over a file that exists, which would change a tensor that is mapped from it.
        return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value

    def release(self) -> None:
        self._state = {}

    def _open(self) -> dict[str, Any]:
        if not self._state:
            content = read_torch(self.path, "cpu", mmap=_can_be_mapped(self.path))
            refused = [f"a {type(content).__name__}"]
            if isinstance(content, Mapping):
                others = {key: type(value) for key, value in content.items() if not isinstance(value, Tensor)}
                refused = [f"{key!r}, a {kind.__name__}" for key, kind in others.items() if not is_extra(key)]
            if refused:
                raise CheckpointError(
                    f"{self.path} holds {refused[0]}, and not only tensors by name. Pass a state dict alone."
                )
            self._state = dict(content)
        return self._state


def _can_be_mapped(path: Path) -> bool:
    """Whether torch can map a file: not those of its old versions."""
    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # what reads it says so
        return False


def is_extra(name: object) -> bool:
    """Whether an entry of a state dict is the extra state of a module, and no tensor."""
    return str(name).rpartition(".")[2] == "_extra_state"


def open_weights(path: Path) -> WeightFile:
    """Open a file of weights: `*.safetensors`, or one of torch under any other name."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a model in all of its files: the file of each tensor, and of each extra state."""

    files: Mapping[str, WeightFile]
    extra: Mapping[str, WeightFile]

    @classmethod
    def open(cls, paths: list[Path]) -> StoredWeights:
        """Open all files."""
        opened = [open_weights(path) for path in paths]
        return cls(
            {name: file for file in opened for name in file.shapes},
            {name: file for file in opened for name in file.extra},
        )

    def shape(self, name: str) -> torch.Size:
        return self.files[name].shapes[name]

    def read(self, name: str, device: torch.device) -> Tensor:
        tensor: Tensor = self.files[name].read(name, device)
        return tensor
