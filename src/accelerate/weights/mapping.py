"""Tensors of a file of safetensors, each mapped by itself: its memory goes when the tensor does."""

from __future__ import annotations

import json
import mmap
import os
import weakref
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerate.base import CheckpointError, like

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
    """Where the values of a tensor lie.

    Attributes:
        start: offset in the file, in bytes.
        end: behind the last of them.
        dtype: of the tensor; None: torch has none of that name.
        shape: of the tensor.
    """

    start: int
    end: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class MappedFile:
    """A file of safetensors whose tensors are mapped one by one, and unmapped when nobody holds them.

    What opens the whole file keeps all pages that were ever read among those of the process. The file stays
    open, so that it is this one that is read, even if another takes its place or it is deleted.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is none, or not a whole one.
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
        """Return a tensor on the CPU; changes do not reach the file.

        Raises:
            CheckpointError: the file does not have it, or was cut off.
        """
        found = self._ranges.get(name)
        if found is None:
            raise CheckpointError(f"{self.path} has no tensor of the name {name}.")
        start, end, dtype, shape = found
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
    found = Range(data + first, data + last, DTYPES.get(entry["dtype"]), shape)
    if not data <= found.start <= found.end <= size:
        raise ValueError(f"{name} is cut off")
    if found.dtype is not None and found.end - found.start != prod(found.shape) * found.dtype.itemsize:
        raise ValueError(f"{name} has not as many bytes as its shape says")
    return found
