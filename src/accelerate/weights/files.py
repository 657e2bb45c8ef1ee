"""Reading and writing of weight files in the formats of safetensors and torch.

Files are read as a whole; `opened.py` reads single tensors. Only tensors, numbers, text and plain containers
are read from the files of torch, so that a file from another source cannot run code here. `PinnedBuffers`
copies tensors to accelerators.
"""

from __future__ import annotations

import _codecs
import io
import json
import logging
import os
import pickle
import re
import stat
import struct
import threading
import warnings
import zipfile
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from accelerate.base import CheckpointError, ConfigurationError, like, replace_files, wrong_value
from accelerate.devices import of_device
from accelerate.state import PartialState
from accelerate.weights.modules import ALIASES, drop_shared, read_aliases
from accelerate.weights.placement import mapped_device, resolve_device

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

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


_accepted_names = threading.RLock()
"""Held while torch accepts further names: at its end, `safe_globals` removes them for all threads."""


def read_torch(path: Target, map_location: MAP_LOCATION = None, **options: Any) -> Any:
    """Reads a file of `torch.save`, as `load` does."""
    try:
        with _accepted_names, torch.serialization.safe_globals(TORCH_SAFE_GLOBALS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            return torch.load(path, map_location=map_location, **{"weights_only": True, **options})
    except pickle.UnpicklingError as error:
        raise CheckpointError(_explain_refusal(path, error)) from error
    except (OSError, *DAMAGE_ERRORS) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the message names the file
            raise
        reason = f"it is truncated, damaged, or not a file of torch.save ({error})"
        text = f"{_name_of(path)} cannot be read: {reason}"
        raise like(CheckpointError(text), error) from error


def refused_globals(path: Path) -> list[str]:
    """Returns the names in a file of `torch.save` that `read_torch` refuses, without running any code."""
    with _accepted_names, torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
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


def load(f: Target, map_location: MAP_LOCATION = None, **kwargs: Any) -> Any:
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


def is_extra(name: object) -> bool:
    """Returns whether an entry of a state dict is the extra state of a module instead of a tensor."""
    return str(name).rpartition(".")[2] == "_extra_state"


# Copies of tensors from the CPU to accelerators, in chunks through pinned memory

NUM_BUFFERS, CHUNK_BYTES = 2, 16 * 2**20
"""Number and bytes of the buffers of pinned memory."""
STAGED_BYTES = 2**18
"""Bytes of the smallest tensor for which a copy through pinned memory is faster."""


class PinnedBuffers:
    """Buffers of pinned memory, through which tensors in other memory are copied to accelerators in chunks.

    The copy of a chunk to the device overlaps with the read of the next one by all threads of torch.
    """

    def __init__(self) -> None:
        self._buffers: deque[tuple[Tensor, Any]] = deque()  # with the events of their copies

    def to(self, source: Tensor, device: torch.device) -> Tensor:
        """Returns a copy of a tensor that `accepts` accepts on a device."""
        target = torch.empty_like(source, device=device)
        self.copy(target, source)
        return target

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a tensor, which may change afterwards, on the current stream of the device of the target.

        Other tensors than those of `accepts`, or of another layout or dtype, are copied by torch.
        """
        is_same = (source.dtype, source.shape) == (target.dtype, target.shape) and target.is_contiguous()
        if not is_same or not self.accepts(source, target.device):
            target.copy_(source)
            return
        stream = stream_module(target.device).current_stream(target.device)
        chunks, targets = (
            torch.split(each.detach().reshape(-1).view(torch.uint8), CHUNK_BYTES) for each in (source, target)
        )
        for chunk, on_device in zip(chunks, targets, strict=True):
            buffer = self._free_buffer()
            on_device.copy_(buffer[: chunk.numel()].copy_(chunk), non_blocking=True)
            self._buffers.append((buffer, stream.record_event()))

    @staticmethod
    def accepts(source: Tensor, device: torch.device) -> bool:
        """Returns whether a tensor is large and on the CPU, and the device has streams."""
        is_plain = type(source) in (Tensor, nn.Parameter) and source.is_cpu and source.is_contiguous()
        is_large = is_plain and source.nbytes >= STAGED_BYTES and not source.is_pinned()
        return is_large and stream_module(device) is not None

    def _free_buffer(self) -> Tensor:
        """Returns a new buffer, or the one whose copy began first after that copy is complete."""
        if len(self._buffers) < NUM_BUFFERS:
            return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        buffer, copied = self._buffers.popleft()
        copied.synchronize()
        return buffer


def stream_module(device: torch.device) -> Any:
    """Returns the torch module of a device, or None if its copies do not run in streams."""
    module = None if of_device(device).is_host else getattr(torch, device.type, None)
    return module if hasattr(module, "Stream") else None
