"""Reading and writing of weight files in the formats of safetensors and torch.

Files are read as a whole, or opened to read single tensors. Only tensors, numbers, text and plain containers
are read from the files of torch, so that a file from another source cannot run code here.
"""

from __future__ import annotations

import _codecs
import io
import json
import logging
import mmap
import os
import pickle
import re
import stat
import struct
import warnings
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from accelerate.base import CheckpointError, ConfigurationError, like, replace_files, wrong_value
from accelerate.state import PartialState
from accelerate.weights.modules import ALIASES, drop_shared, read_aliases
from accelerate.weights.placement import mapped_device, resolve_device

logger = logging.getLogger(__name__)  # also used without a `PartialState`

Target = str | os.PathLike[str] | IO[bytes]

np_core = np._core if hasattr(np, "_core") else np.core


def _empty_bytes(*content: Any) -> bytes:
    """Returns what `bytes()` returns, and refuses to allocate memory for anything else."""
    if content:
        raise pickle.UnpicklingError("bytes() has an argument")
    return b""


TORCH_SAFE_GLOBALS: list[Any] = [
    *((_empty_bytes, f"{module}.bytes") for module in ("builtins", "__builtin__")),
    np_core.multiarray._reconstruct,
    (np_core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    (np_core.multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),
    np_core.multiarray.scalar,
    np.ndarray,
    _codecs.encode,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"},
]
"""Functions and types of numpy that `weights_only` accepts, for arrays such as generator states."""


def write_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors to a safetensors file, in which a shared tensor is stored once.

    The metadata of the file contains its other names.
    """
    write_whole_tensors(*drop_shared(state), path)


def write_whole_tensors(kept: Mapping[str, Tensor], aliases: Mapping[str, str], path: Path) -> None:
    """Writes contiguous tensors that share no memory, and the aliases of some."""
    metadata = {"format": "pt", **({ALIASES: json.dumps(dict(aliases))} if aliases else {})}
    try:
        _save_with_usual_mode(dict(kept), path, metadata)
    except KeyError as error:
        name = next((name for name, tensor in kept.items() if tensor.dtype == error.args[0]), None)
        if name is None:
            raise
        fix = "convert it, or pass safe_serialization=False"
        raise wrong_value(name, error.args[0], "safetensors has no such dtype", fix) from error
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def _save_with_usual_mode(state: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a file with default permissions, where safetensors would set 0600."""
    is_new = not path.exists()
    with path.open("ab") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(state, path, metadata)
        path.chmod(mode)
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise


def read_safetensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Reads all tensors of a file.

    Names that share a tensor get the same tensor.
    """
    try:
        with safe_open(path, "pt") as opened:  # safetensors supports only some types of devices
            state = {name: opened.get_tensor(name).to(device) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata()
    except (SafetensorError, OSError) as error:
        raise like(CheckpointError(f"{path} cannot be read as safetensors: {error}"), error) from error
    aliases = read_aliases(metadata, state.keys(), path)
    return {**state, **{name: state[first] for name, first in aliases.items()}}


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with contiguous tensors, in which each shared tensor has one name.

    Args:
        state_dict: tensors by name.

    Returns:
        A new dictionary. One warning lists the names that were left out.
    """
    kept, aliases = drop_shared(state_dict)
    if aliases:
        logger.warning(
            f"Shared tensors are stored under one name each; left out: {', '.join(sorted(aliases))}."
        )
    return kept


def write_torch(obj: object, path: Path) -> None:
    """Writes any picklable object with `torch.save`.

    Raises an `OSError` if the file cannot be written.
    """
    try:
        torch.save(obj, path)
    except RuntimeError as error:  # raised by torch when the disk is full
        raise like(OSError(f"{path} could not be written: {error}"), error) from error


DAMAGE_ERRORS = (
    RuntimeError,
    EOFError,
    zipfile.BadZipFile,
    LookupError,
    ValueError,
    struct.error,
    TypeError,
    AttributeError,
    AssertionError,
)
"""Exceptions that torch raises for a damaged file."""


def read_torch(path: Target, map_location: Any = None, **options: Any) -> Any:
    """Reads a file of `torch.save`, as `load` does."""
    try:
        with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            return torch.load(path, map_location=map_location, **{"weights_only": True, **options})
    except pickle.UnpicklingError as error:
        raise CheckpointError(_explain_refusal(path, error)) from error
    except (OSError, *DAMAGE_ERRORS) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the message names the file
            raise
        text = f"{_name_of(path)} cannot be read: it is cut off, damaged, or no file of torch.save ({error})"
        raise like(CheckpointError(text), error) from error


def refused_globals(path: Path) -> list[str]:
    """Returns the names in a file of `torch.save` that `read_torch` refuses, without running any code."""
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), Tensor, torch.nn.Parameter})
"""Types that `read_torch` accepts, and that contain nothing else."""


def refused_values(value: object) -> dict[str, str]:
    """Returns the position of the first value of each type that `read_torch` refuses in nested containers.

    The keys are the names of the types. An object with other objects in it is not searched.
    """
    refused: dict[str, str] = {}
    accepted: set[type] = set()
    containers: set[int] = set()  # which may contain themselves

    def search(value: Any, position: str) -> None:
        kind = type(value)
        if kind in _PLAIN or kind in accepted or id(value) in containers:
            return
        containers.add(id(value))
        if kind in (dict, OrderedDict):
            if not set(map(type, value)) <= _PLAIN:
                for key in value:
                    search(key, f"the key {key!r} of {position}" if position else f"the key {key!r}")
            values: Iterable[tuple[Any, Any]] = value.items()
        elif kind in (list, tuple, set):
            values = enumerate(value)
        else:
            if name := _refused_name(value):
                refused.setdefault(name, position or "the whole")
            elif isinstance(value, Tensor):
                accepted.add(kind)
            return
        children = value.values() if isinstance(value, dict) else value
        if not set(map(type, children)) <= _PLAIN:
            for key, child in values:
                search(child, f"{position}[{key!r}]")

    search(value, "")
    return refused


def _refused_name(value: object) -> str:
    """Returns the name of what `read_torch` refuses in the file of one value, or an empty string."""
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    try:
        read_torch(memory)
    except Exception as error:  # torch raises errors of many classes
        match = re.search(r"`(\S+)`", str(error))
        return match[1] if match else f"{type(value).__module__}.{type(value).__qualname__}"
    return ""


def _explain_refusal(path: Target, error: pickle.UnpicklingError) -> str:
    match = re.search(r"GLOBAL (\S+)", str(error))
    if match is None:
        return f"{_name_of(path)} cannot be read: it is damaged, or no file of torch.save"
    return (
        f"{_name_of(path)} holds a `{match[1]}`, and only tensors, numbers, text and plain containers are "
        "read; other objects can run code when they are loaded. If you trust the file, read it with "
        "torch.load(path, weights_only=False) and save its tensors anew; where there is an argument "
        'load_kwargs, pass load_kwargs={"weights_only": False}.'
    )


def _name_of(path: Target) -> str:
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else str(getattr(path, "name", path))


def save(obj: Any, f: Target, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Writes an object to one file from one process, and may be called on any ranks.

    A temporary file is written first and then renamed, so that a file is replaced as a whole.

    Args:
        obj: any picklable object, or with `safe_serialization` a dictionary of tensors.
        f: a path, or a binary file object.
        save_on_each_node: whether local rank 0 of each node writes the file, and not only rank 0.
        safe_serialization: whether to write the format of safetensors, which requires a path.

    Raises:
        ConfigurationError: `safe_serialization` with a file object, or with something that is not a tensor.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if isinstance(f, (str, os.PathLike)):
        with replace_files([Path(f)]) as (temporary,):
            (write_safetensors if safe_serialization else write_torch)(obj, temporary)
    elif safe_serialization:
        raise ConfigurationError("safe_serialization=True needs the path of a file; this is a file object.")
    else:
        torch.save(obj, f)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Reads a file of weights.

    Names that share a tensor get the same tensor.

    Args:
        checkpoint_file: `*.safetensors`, or a file of torch under any other name.
        device_map: device of each module. Weights of "disk" and of modules without an entry are on the CPU.

    Returns:
        Tensors by name.

    Raises:
        CheckpointError: the file is damaged, or contains other objects.
    """
    path = Path(checkpoint_file)
    state = read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path, "cpu")
    if not device_map:
        return cast("dict[str, Tensor]", state)
    moved: dict[tuple[int, torch.device], Tensor] = {}
    result = {}
    for name, tensor in state.items():
        entry = mapped_device(name, device_map)
        device = resolve_device("cpu" if entry in (None, "disk") else entry)
        result[name] = moved.setdefault((id(tensor), device), tensor.to(device))
    return result


def load(f: Target, map_location: Any = None, **kwargs: Any) -> Any:
    """Reads a file of `torch.save`, by default with tensors, numbers, text and plain containers only.

    Args:
        f: a path, or a binary file object.
        map_location: device of the tensors, as for `torch.load`.
        **kwargs: further arguments of `torch.load`. `weights_only=False` reads any object, and runs
            any code in the file.

    Raises:
        CheckpointError: the file is damaged, or contains other objects.
    """
    return read_torch(f, map_location, **kwargs)


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
        raise ValueError("its header is cut off")
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
        raise ValueError(f"{name} is cut off")
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


def is_extra(name: object) -> bool:
    """Returns whether an entry of a state dict is the extra state of a module instead of a tensor."""
    return str(name).rpartition(".")[2] == "_extra_state"


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
        """Opens all files."""
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
