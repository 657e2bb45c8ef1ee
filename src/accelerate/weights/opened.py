"""Files of weights that are opened to read single tensors, which are mapped or read in ranges of bytes."""

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
from accelerate.weights.files import is_extra, read_torch
from accelerate.weights.modules import read_aliases

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
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
"""Names of dtypes in headers, from https://github.com/huggingface/safetensors#format."""

LENGTH_SIZE = 8
"""Size in bytes of the number at the start of a file, which is the length of its header."""


class Range(NamedTuple):
    """Range of bytes in a file with the values of a tensor, whose dtype is None if torch lacks it."""

    start: int
    end: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class MappedFile:
    """Safetensors file whose tensors are mapped one by one, and unmapped when they are released.

    Opening the whole file would keep all pages that were ever read. The file stays open, so that the same
    file is read even if another replaces it or it is deleted.
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
        return MappedFile, (self.path,)  # a copy opens the file again

    def read(self, name: str) -> Tensor:
        """Returns a tensor on the CPU, whose changes do not reach the file."""
        stored = self._ranges.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path} has no tensor of the name {name}.")
        start, end, dtype, shape = stored
        if dtype is None:
            raise CheckpointError(f"{name} of {self.path} has a dtype that this torch does not support.")
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
    length = int.from_bytes(os.read(file, LENGTH_SIZE), "little")
    if length > size - LENGTH_SIZE:
        raise ValueError("its header is truncated")
    with open(file, "rb", closefd=False) as header_file:
        header: dict[str, Any] = json.loads(header_file.read(length))
    header.pop("__metadata__", None)
    return {name: _range_of(name, entry, LENGTH_SIZE + length, size) for name, entry in header.items()}


def _range_of(name: str, entry: dict[str, Any], data: int, size: int) -> Range:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (first, last, *shape)):
        raise ValueError(f"{name} has a shape or offsets that are not sizes")
    stored = Range(data + first, data + last, DTYPES.get(entry["dtype"]), shape)
    if not data <= stored.start <= stored.end <= size:
        raise ValueError(f"{name} is truncated")
    if stored.dtype is not None and stored.end - stored.start != prod(stored.shape) * stored.dtype.itemsize:
        raise ValueError(f"{name} has not as many bytes as its shape says")
    return stored


class WeightFile:
    """Interface of a file of weights, from which single tensors are read."""

    path: Path
    shapes: Mapping[str, torch.Size]  # of all tensors by name, including aliases
    extra: Collection[str]  # names of the extra states of modules

    def read(self, name: str, device: torch.device) -> Any:
        """Returns one tensor or extra state.

        A tensor from safetensors is mapped on the CPU as a private copy.
        """
        raise NotImplementedError

    def locate(self, name: str) -> tuple[Path, str] | None:
        """Returns the file and the name under which a tensor can be mapped, or None if it cannot."""
        return None

    def release(self) -> None:
        """Closes the file until the next read, because mapped pages count as memory in use."""


class SafetensorsFile(WeightFile):
    """Safetensors file, which is open from the first read on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = None
        handle = self._open()
        shapes = {name: torch.Size(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        self._first = read_aliases(handle.metadata(), shapes.keys(), path)
        shapes.update({name: shapes[first] for name, first in self._first.items()})
        self.extra = [name for name in shapes if is_extra(name)]
        self.shapes = {name: shape for name, shape in shapes.items() if not is_extra(name)}

    def read(self, name: str, device: torch.device) -> Tensor:
        try:
            tensor: Tensor = self._open().get_tensor(self._first.get(name, name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {self.path}: {error}") from error
        return tensor.to(device)  # safetensors supports only some types of devices

    def locate(self, name: str) -> tuple[Path, str]:
        return self.path, self._first.get(name, name)

    def release(self) -> None:
        self._handle = None

    def _open(self) -> Any:
        if self._handle is None:
            try:
                self._handle = safe_open(self.path, "pt")
            except (SafetensorError, OSError) as error:
                text = f"{self.path} cannot be read as safetensors: {error}"
                raise like(CheckpointError(text), error) from error
        return self._handle


class TorchFile(WeightFile):
    """State dict in a file of torch, from which only tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: dict[str, Any] = {}
        state = self._open()
        self.extra = list(filter(is_extra, state))
        self.shapes = {name: tensor.shape for name, tensor in state.items() if not is_extra(name)}

    def read(self, name: str, device: torch.device) -> Any:
        value = self._open()[name]
        # torch.save overwrites an existing file, which would change a tensor that is mapped from it.
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
    """Returns whether torch can map a file, which it cannot in its old format."""
    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # reading it raises the error
        return False


def open_weights(path: Path) -> WeightFile:
    """Opens a file of weights, which is read as safetensors if its name ends with `.safetensors`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


@dataclass(frozen=True)
class StoredWeights:
    """Files of a model by the names of their tensors and extra states."""

    files: Mapping[str, WeightFile]
    extra: Mapping[str, WeightFile]

    @classmethod
    def open(cls, paths: list[Path]) -> StoredWeights:
        files = [open_weights(path) for path in paths]
        return cls(
            {name: file for file in files for name in file.shapes},
            {name: file for file in files for name in file.extra},
        )

    def shape(self, name: str) -> torch.Size:
        return self.files[name].shapes[name]

    def read(self, name: str, device: torch.device) -> Tensor:
        tensor: Tensor = self.files[name].read(name, device)
        return tensor
