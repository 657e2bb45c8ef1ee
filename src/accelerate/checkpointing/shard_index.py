"""Metadata of a folder of shards, which is the file `.metadata` of torch.distributed.checkpoint (DCP).

`read` returns a `ShardIndex` with the shape, dtype and files of each tensor of a state. It is called when
shards are loaded, merged or compared. The file is a pickle. The unpickler finds only the classes of such
metadata, and other operations than those that it contains are refused, so the file cannot run other code.
Its content is verified before anything is allocated.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import AccelerateError, CheckpointError, describe, refuse_outside, without_collection

if TYPE_CHECKING:  # it takes most of a second to import
    from torch.distributed.checkpoint.metadata import Metadata

NAME = ".metadata"
MAX_SIZE = 2**63  # one more than the largest number of bytes or elements
MAX_DIMENSIONS = 64  # of a tensor, and keys in a path
MAX_CHARACTERS = 100  # of a name from the file in an error message

OPERATIONS = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST",
    "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET",
    "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD",
}  # fmt: skip
"""Operations of a pickle that such metadata contains."""

KeyPath = tuple[Any, ...]
"""Keys of a value in nested dictionaries, such as ("model", "layer.weight")."""


@dataclass(frozen=True)
class ShardIndex:
    """Content of a folder of shards, with the DCP key of each tensor or value by its path."""

    folder: Path
    metadata: Metadata
    paths: Mapping[KeyPath, str]
    has_all_files: bool = True  # whether the folder holds all files, and not only those that this rank reads

    def stored(self, path: KeyPath) -> Tensor | None:
        """Returns a tensor on the meta device with the stored shape and dtype, or None for another value."""
        entry: Any = self.metadata.state_dict_metadata[self.paths[path]]
        if not hasattr(entry, "size"):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def without(self, names: Set[str]) -> ShardIndex:
        """Returns an index without the values of some weights or parameters."""
        kept = {path: key for path, key in self.paths.items() if not names & set(path[1:3])}
        return replace(self, paths=kept)

    def check_files(self, keys: Container[str], files: Container[str] | None = None) -> None:
        """Verifies that the files of some keys exist and are large enough.

        Args:
            keys: DCP keys.
            files: Names of the files to verify. None verifies all if the folder holds all.
        """
        if files is None and not self.has_all_files:
            return
        needed: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            if index.fqn in keys and (files is None or info.relative_path in files):
                needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        problems = []
        for file, size in sorted(needed.items()):
            path = self.folder / file
            if not path.is_file():
                problems.append(f"{self.folder.name}/{file} is missing")
            elif path.stat().st_size < size:
                problems.append(
                    f"{self.folder.name}/{file} has {path.stat().st_size} bytes, and at least {size} are "
                    "needed: it is truncated, or another file"
                )
        if problems:
            raise CheckpointError("; ".join(problems))


def read(folder: Path, root: str, *, trusted: bool = False) -> ShardIndex:
    """Reads the metadata of a folder.

    Args:
        root: First key of all paths. It is added to the paths of a state that was saved without it.
        trusted: Whether the file may contain objects of any class.
    """
    name = f"{folder.name}/{NAME}"
    try:
        content = (folder / NAME).read_bytes()
        metadata = pickle.loads(content) if trusted else read_metadata(content)
        paths = dict(metadata.planner_data or {})
        keys = list(metadata.state_dict_metadata)
        iter(metadata.storage_data.items())
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is missing") from error
    except AccelerateError as error:
        raise CheckpointError(f"{name} {error}") from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(
            f"{name} cannot be read: it is damaged, or not metadata of shards ({describe(error)})"
        ) from error
    by_key = {key: tuple(paths.get(key, (key,))) for key in keys}
    has_root = all(len(path) > 1 and path[0] == root for path in by_key.values())
    by_path = {path if has_root else (root, key): key for key, path in by_key.items()}
    if len(by_path) != len(by_key):
        raise CheckpointError(f"{name} gives several entries the same path")
    return ShardIndex(folder, metadata, by_path)


def read_metadata(content: bytes) -> Metadata:
    """Decodes the content of a file `.metadata`.

    Raises:
        CheckpointError: The file contains other objects, or sizes that contradict each other. The message
            does not name the file. A damaged file can raise any exception.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    _check_operations(content)
    with without_collection():
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError("is not metadata of shards")
        _check(metadata)
    return metadata


def _check_operations(content: bytes) -> None:
    """Verifies that a pickle contains only operations of metadata, which look up globals by `find_class`."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name not in OPERATIONS:
            _refuse(f"the operation {operation.name} of a pickle")
        # The unpickler allocates memory for all objects with a smaller number.
        if operation.name == "LONG_BINPUT" and cast(int, argument) > len(content):
            _refuse(f"the number {argument} of an object")


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that finds only the classes of DCP's metadata."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._allowed = _allowed_globals()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(value := vars(torch).get(name), (torch.dtype, torch.layout)):
            return value
        if (module, name) not in self._allowed:
            _refuse(f"a `{f'{module}.{name}'[:MAX_CHARACTERS]}`")
        return self._allowed[module, name]


def _allowed_globals() -> dict[tuple[str, str], Callable[..., Any]]:
    """Returns the callable for each global that the file may name.

    Each is new, so a file that sets attributes of a global does not change a class of this process.
    """
    from torch.distributed.checkpoint import metadata

    classes: list[type] = [
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.StorageMeta,
        torch_private.StorageInfo,
    ]
    path_modules, path_names = ("pathlib", "pathlib._local"), ("Path", "PosixPath", "WindowsPath")
    paths = [(module, name) for module in path_modules for name in path_names]
    properties: list[type] = [metadata.TensorProperties, torch_private.OldTensorProperties]
    formats: list[type] = [torch_private.MemoryFormat, torch_private.OldMemoryFormat]
    return {
        **{(kind.__module__, kind.__name__): _allocator(kind) for kind in classes},
        **{(kind.__module__, kind.__name__): _allocator(_tolerant(kind)) for kind in properties},
        **{(kind.__module__, kind.__name__): lambda value: None for kind in formats},  # a deprecated property
        **dict.fromkeys(paths, lambda *parts: None),  # where the file was saved, which is not needed
        ("torch", "Size"): lambda sizes: torch.Size(sizes),
        ("torch.serialization", "_get_layout"): lambda name: _find_layout(name),
        ("collections", "OrderedDict"): dict,
    }


def _allocator(kind: type) -> type:
    """Returns a class whose instances are empty instances of another class."""
    return type(kind.__name__, (), {"__new__": lambda _: object.__new__(kind)})


def _tolerant(kind: type) -> type:
    """Returns a subclass of properties of tensors, of which a newer torch may write more."""

    class Properties(kind):  # type: ignore[misc]
        def __setstate__(self, state: Mapping[str, Any]) -> None:
            dtype, layout, requires_grad, *_ = state
            self.__class__ = kind
            self.__init__(dtype, layout, requires_grad)  # type: ignore[misc]

    return Properties


def _find_layout(name: str) -> torch.layout:
    layout = vars(torch)[name.removeprefix("torch.")]
    if not isinstance(layout, torch.layout):
        _refuse(f"the layout {name[:MAX_CHARACTERS]!r}")
    return layout


def _refuse(content: str) -> NoReturn:
    raise CheckpointError(
        f"holds {content}, and only what such metadata needs is read; other objects can run code when they "
        'are loaded. If you trust the file, pass load_kwargs={"weights_only": False}'
    )


def _check(metadata: Metadata) -> None:
    """Verifies types, file names and sizes.

    No file may be outside the folder, and no tensor may be larger than its files, because memory for tensors
    is allocated before the files are read.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

    refuse_outside_once = cache(refuse_outside)  # thousands of entries are in the same few files
    num_bytes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, torch_private.StorageInfo):
            _refuse("a position that is not in a file")
        if reason := refuse_outside_once(info.relative_path):
            _refuse(f"the file name {str(info.relative_path)[:MAX_CHARACTERS]!r}, which {reason}")
        if not (_is_size(info.offset) and _is_size(info.length)):
            _refuse("a position in a file that is not a number of bytes")
        compressed = getattr(info, "transform_descriptors", None)
        if compressed is not None and not all(isinstance(name, str) for name in compressed):
            _refuse("a transformation that is not a name")
        num_bytes[index.fqn] = num_bytes.get(index.fqn, 0) + (MAX_SIZE if compressed else info.length)
    seen: set[int] = set()
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            if id(entry.chunks) in seen:
                _refuse("chunks that belong to several tensors")
            seen.add(id(entry.chunks))
            _check_tensor(str(key)[:MAX_CHARACTERS], entry, num_bytes.get(key, 0))
        elif not isinstance(entry, BytesStorageMetadata) or not isinstance(key, str):
            _refuse(f"an object other than a tensor or a value for {str(key)[:MAX_CHARACTERS]!r}")
    for path in (metadata.planner_data or {}).values():
        is_path = type(path) is tuple and len(path) <= MAX_DIMENSIONS
        if not is_path or not all(isinstance(key, str) or _is_size(key) for key in path):
            _refuse("a path that is not a tuple of names and numbers")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_SIZE


def _check_tensor(name: str, entry: Any, num_bytes: int) -> None:
    """Verifies that the chunks of a tensor are inside it, fill it, and are not larger than their files."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    shape, num_elements = tuple(entry.size), 0
    if not isinstance(getattr(entry.properties, "dtype", None), torch.dtype):
        _refuse(f"{name!r} without a dtype")
    if len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        _refuse(f"{name!r} with a shape that is not a tuple of sizes")
    for chunk in entry.chunks:
        is_chunk = isinstance(chunk, ChunkStorageMetadata)
        if not is_chunk or not len(shape) == len(chunk.offsets) == len(chunk.sizes):
            _refuse(f"chunks of {name!r} with another number of dimensions")
        if not all(map(_is_size, (*chunk.offsets, *chunk.sizes))) or any(
            start + size > length
            for start, size, length in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            _refuse(f"chunks of {name!r} that are outside of it")
        num_elements += math.prod(chunk.sizes)
    if num_elements != math.prod(shape):
        raise CheckpointError(f"gives {name!r} {math.prod(shape)} elements, and {num_elements} in files")
    if num_elements * entry.properties.dtype.itemsize > min(num_bytes, MAX_SIZE - 1):
        raise CheckpointError(f"gives {name!r} {num_elements} elements in {num_bytes} bytes of files")
