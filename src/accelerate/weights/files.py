"""One state dict <-> one file, in the formats of safetensors and of torch.

What is read from torch's files is limited to tensors, numbers, text and plain containers: a file that
somebody else has written cannot run code here.
"""

from __future__ import annotations

import _codecs
import json
import logging
import os
import pickle
import re
import stat
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from accelerate.base import CheckpointError, ConfigurationError, like, replace_files, wrong_value
from accelerate.state import PartialState
from accelerate.weights.placement import mapped_device, resolve_device
from accelerate.weights.shared import ALIASES, drop_shared, read_aliases

logger = logging.getLogger(__name__)  # also used where no run is set up

Target = str | os.PathLike[str] | IO[bytes]

np_core = np._core if hasattr(np, "_core") else np.core

TORCH_SAFE_GLOBALS: list[Any] = [
    np_core.multiarray._reconstruct,
    (np_core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    (np_core.multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),
    np_core.multiarray.scalar,
    np.ndarray,
    _codecs.encode,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"},
]
"""What torch's restricted reader may build beside its own: arrays of numbers, as states of generators are."""


def write_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a file of safetensors: shared ones once; its metadata has their other names."""
    write_whole_tensors(*drop_shared(state), path)


def write_whole_tensors(kept: Mapping[str, Tensor], aliases: Mapping[str, str], path: Path) -> None:
    """Write contiguous tensors of which no two share memory, and the further names of some."""
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
    """Write a file with the permissions of any new file, where safetensors gives it 0600."""
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
    """Read all tensors of a file; names that share a tensor get the same one."""
    try:
        with safe_open(path, "pt", device=str(device)) as opened:
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata()
    except (SafetensorError, OSError) as error:
        raise like(CheckpointError(f"{path} cannot be read as safetensors: {error}"), error) from error
    aliases = read_aliases(metadata, state.keys(), path)
    return {**state, **{name: state[first] for name, first in aliases.items()}}


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict as safetensors takes it: contiguous, each shared tensor under one name only.

    Args:
        state_dict: tensors by name.

    Returns:
        A new dictionary. Which names were left out is said once, in a warning.
    """
    kept, aliases = drop_shared(state_dict)
    if aliases:
        logger.warning(
            f"Shared tensors are stored under one name each; left out: {', '.join(sorted(aliases))}."
        )
    return kept


def write_torch(obj: Any, path: Path) -> None:
    """Write any picklable object with `torch.save`; an `OSError` says that the file cannot be written."""
    try:
        torch.save(obj, path)
    except RuntimeError as error:  # what torch makes of a full disk
        raise like(OSError(f"{path} could not be written: {error}"), error) from error


DAMAGES = (
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
"""What torch raises when the bytes of a file are not those that were written."""


def read_torch(path: Target, map_location: Any = None, **options: Any) -> Any:
    """Read what `torch.save` wrote, as `load` does."""
    try:
        with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
            return torch.load(path, map_location=map_location, **{"weights_only": True, **options})
    except pickle.UnpicklingError as error:
        raise CheckpointError(_explain_refusal(path, error)) from error
    except (OSError, *DAMAGES) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the system's own words name the file
            raise
        text = f"{_name_of(path)} cannot be read: it is cut off, damaged, or no file of torch.save ({error})"
        raise like(CheckpointError(text), error) from error


def refused_globals(path: Path) -> list[str]:
    """Return the names of what a file of torch.save holds and `read_torch` would not read; nothing is run."""
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def _explain_refusal(path: Target, error: pickle.UnpicklingError) -> str:
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused is None:
        return f"{_name_of(path)} cannot be read: it is damaged, or no file of torch.save"
    return (
        f"{_name_of(path)} holds a `{refused[1]}`, and only tensors, numbers, text and plain containers are "
        "read; other objects can run code when they are loaded. If you trust the file, read it with "
        "torch.load(path, weights_only=False) and save its tensors anew; where there is an argument "
        'load_kwargs, pass load_kwargs={"weights_only": False}.'
    )


def _name_of(path: Target) -> str:
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else str(getattr(path, "name", path))


def save(obj: Any, f: Target, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object to one file, once; called on any ranks.

    A temporary file is written first and then renamed, so that an older file is replaced by a whole one.

    Args:
        obj: anything that can be pickled; with `safe_serialization` a dictionary of tensors.
        f: a path, or a binary file object.
        save_on_each_node: whether the first process of each machine writes it, and not only that of the
            first.
        safe_serialization: write the format of safetensors; needs a path.

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
    """Read a file of weights; names that share a tensor get the same one.

    Args:
        checkpoint_file: `*.safetensors`, or a file of torch under any other name.
        device_map: devices by module, for each weight; "disk" and modules that are not in it are on the CPU.

    Returns:
        Tensors by name.

    Raises:
        CheckpointError: the file is broken, or holds other things.
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
    """Read what `torch.save` wrote; only tensors, numbers, text and plain containers by default.

    Args:
        f: a path, or a binary file object.
        map_location: where tensors go, as for `torch.load`.
        **kwargs: further arguments of `torch.load`; `weights_only=False` reads any object, and runs
            any code that the file contains.

    Raises:
        CheckpointError: the file is broken, or holds other things.
    """
    return read_torch(f, map_location, **kwargs)
