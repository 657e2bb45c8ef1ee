"""The file `.metadata` of a folder of shards, as it is read: which file holds which shard.

It is a pickle of torch.distributed.checkpoint, and is read without running what a pickle can run. A pickle is
a program, and a list of allowed classes is not enough: its operations also change classes of this process,
call allowed functions with odd arguments, and reserve memory that the file does not have. Here a short list
of operations is run. Each object is made empty, filled once with fields of the right types, and changed by
nothing afterwards.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import AccelerateError, CheckpointError, describe, refuse_outside, without_collection

if TYPE_CHECKING:  # it takes most of a second to import
    from torch.distributed.checkpoint.metadata import Metadata

NAME = ".metadata"
LARGEST = 2**63  # one more than the largest number of bytes or elements
DIMENSIONS = 64  # dimensions of a tensor, and keys on the way to a value, at most
SHOWN = 100  # characters of a name of the file in a message

OPERATIONS = (
    *("PROTO", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "EMPTY_DICT", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL"),
)
"""What is run as Python's own reader runs it; `_Careful` has the others."""

KeyPath = tuple[Any, ...]
"""The keys on the way to a value in nested dictionaries: ("model", "layer.weight")."""

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class ShardIndex:
    """The tensors and values in a folder of shards: the key of each by its path."""

    folder: Path
    metadata: Metadata
    paths: Mapping[KeyPath, str]

    def stored(self, path: KeyPath) -> Tensor | None:
        """Return the shape and dtype of a tensor, on the meta device; None for another value."""
        entry: Any = self.metadata.state_dict_metadata[self.paths[path]]
        if not hasattr(entry, "size"):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def check_files(self, keys: Container[str]) -> None:
        """Compare the sizes of the files that hold some keys with the metadata; nothing is read."""
        needed: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            if index.fqn in keys:
                needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        problems = []
        for file, size in sorted(needed.items()):
            path = self.folder / file
            if not path.is_file():
                problems.append(f"{self.folder.name}/{file} is missing")
            elif path.stat().st_size < size:
                problems.append(
                    f"{self.folder.name}/{file} has {path.stat().st_size} bytes, and at least {size} are "
                    "needed: it is cut off, or another file"
                )
        if problems:
            raise CheckpointError("; ".join(problems))


def read(folder: Path, root: str, *, trusted: bool = False) -> ShardIndex:
    """Read the metadata of a folder; `trusted` builds whatever objects the file holds. What was saved
    without the key `root` is read as if it had it."""
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
    except Exception as error:  # a pickle that is cut off may raise anything
        raise CheckpointError(
            f"{name} cannot be read: it is damaged, or no metadata of shards ({describe(error)})"
        ) from error
    known = {key: tuple(paths.get(key, (key,))) for key in keys}
    nested = all(len(path) > 1 and path[0] == root for path in known.values())
    by_path = {path if nested else (root, key): key for key, path in known.items()}
    if len(by_path) != len(known):
        raise CheckpointError(f"{name} gives several entries the same path")
    return ShardIndex(folder, metadata, by_path)


def read_metadata(content: bytes) -> Metadata:
    """Return what a file `.metadata` holds. A CheckpointError, without its name, where it holds anything
    else; any error where bytes are missing or changed."""
    from torch.distributed.checkpoint.metadata import Metadata

    reader = _Careful(io.BytesIO(content))  # reads no more than there is, whatever lengths the file gives
    with without_collection():
        metadata = reader.run()
        if not isinstance(metadata, Metadata) or not reader.is_complete():
            raise CheckpointError("is no metadata of shards")
        _check(metadata)
    return metadata


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _is(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_few_texts(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) <= DIMENSIONS and all(map(_is_text, value))


@dataclass(frozen=True)
class _Kind:
    """A class of which the file may hold instances; the file never gets at the class itself."""

    make: type
    fields: Mapping[str, Check]

    def fill(self, instance: Any, state: Any) -> None:
        if type(state) is not dict:
            _refuse(f"a {self.make.__name__} with a state of type {type(state).__name__}")
        for name, value in state.items():
            check = self.fields.get(name)
            if not (value is None if check is None else check(value)):
                shown = repr(value[:SHOWN]) if isinstance(value, str) else f"a {type(value).__name__}"
                _refuse(f"a {self.make.__name__} whose {str(name)[:SHOWN]!r} is {shown}")
        instance.__dict__.update(state)


@dataclass(frozen=True)
class _Properties(_Kind):
    """The properties of a tensor, whose state is a tuple."""

    def fill(self, instance: Any, state: Any) -> None:
        checks = self.fields.values()
        fits = type(state) is tuple and len(state) == len(checks)
        if not (fits and all(check(value) for check, value in zip(checks, state, strict=True))):
            _refuse(f"a {self.make.__name__} with a state of another form")
        instance.__setstate__(state)


@dataclass(frozen=True)
class _Function:
    """What the file may call, with the arguments that fit."""

    call: Callable[..., Any]


def _make_size(dims: Any) -> torch.Size:
    if type(dims) is not tuple or len(dims) > DIMENSIONS or not all(map(_is_size, dims)):
        _refuse("a torch.Size of other values than sizes")
    return torch.Size(dims)


def _find_layout(name: Any) -> torch.layout:
    layout = vars(torch).get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if not isinstance(layout, torch.layout):
        _refuse("a layout that there is not")
    return layout


def _make_member(kind: Callable[[int], Any], value: Any) -> Any:
    if type(value) is not int:
        _refuse("a format that there is not")
    return kind(value)


def _pass_over(*parts: Any) -> None:
    """Take a path, which says where the file was saved and is not needed."""


def _known() -> dict[tuple[str, str], _Kind | _Function]:
    """Return what the file may name, beside dtypes and layouts."""
    from torch.distributed.checkpoint import metadata

    size, refuse = _is(torch.Size), cache(refuse_outside)  # thousands of entries name the same few files
    formats: tuple[type, ...] = (torch_private.MemoryFormat, torch_private.OldMemoryFormat)
    properties = {
        "dtype": _is(torch.dtype),
        "layout": _is(torch.layout),
        "requires_grad": _is(bool),
        "memory_format": _is(*formats),
        "pin_memory": _is(bool),
    }
    text_or_none, size_or_none = _or_none(_is_text), _or_none(_is_size)
    fields: dict[type, dict[str, Check]] = {
        metadata.Metadata: {
            "state_dict_metadata": _is(dict),
            "planner_data": _or_none(_is(dict)),
            "storage_data": _is(dict),
            "storage_meta": _or_none(_is(metadata.StorageMeta)),
            "version": text_or_none,
        },
        metadata.MetadataIndex: {"fqn": _is_text, "offset": _or_none(size), "index": size_or_none},
        metadata.TensorStorageMetadata: {
            "properties": _is(metadata.TensorProperties, torch_private.OldTensorProperties),
            "size": size,
            "chunks": _is(list),
        },
        metadata.BytesStorageMetadata: {},
        metadata.ChunkStorageMetadata: {"offsets": size, "sizes": size},
        metadata.StorageMeta: {
            **dict.fromkeys(("checkpoint_id", "save_id", "load_id"), text_or_none),
            "modules": _is(list),
        },
        torch_private.StorageInfo: {
            "relative_path": lambda value: isinstance(value, str) and refuse(value) is None,
            "offset": _is_size,
            "length": _is_size,
            "transform_descriptors": _or_none(_is_few_texts),
        },
    }
    kinds = [
        *(_Kind(make, checks) for make, checks in fields.items()),
        _Properties(metadata.TensorProperties, properties),
        _Properties(torch_private.OldTensorProperties, properties),
    ]
    modules, names = ("pathlib", "pathlib._local"), ("Path", "PosixPath", "WindowsPath")
    paths = [(module, name) for module in modules for name in names]
    return {
        **{(kind.make.__module__, kind.make.__name__): kind for kind in kinds},
        **{(enum.__module__, enum.__name__): _Function(partial(_make_member, enum)) for enum in formats},
        **dict.fromkeys(paths, _Function(_pass_over)),
        ("torch", "Size"): _Function(_make_size),
        ("torch.serialization", "_get_layout"): _Function(_find_layout),
        ("collections", "OrderedDict"): _Function(dict),
    }


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(
        f"holds {what}, and only what such metadata needs is read; other objects can run code when they are "
        'loaded. If you trust the file, pass load_kwargs={"weights_only": False}'
    )


_PythonReader: Any = pickle._Unpickler  # the one in C can neither refuse operations nor bound its memory


class _Careful(_PythonReader):  # type: ignore[misc]
    """Runs the operations of a pickle that such metadata needs, and no other."""

    def __init__(self, file: io.BytesIO) -> None:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        super().__init__(file)
        self._file = file
        self._keys = {str, MetadataIndex}
        self._known = _known()
        self._empty: dict[int, tuple[Any, _Kind]] = {}

    def run(self) -> Any:
        """Return the object that the pickle makes; frames are passed over, as all of it is in memory."""
        read = self.read = self._file.read
        self.readline = self._file.readline
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        while operation := read(1):
            if operation == pickle.STOP:
                return self.stack.pop()
            method = self.dispatch.get(operation[0])
            if method is None:
                _refuse(f"the operation {operation!r} of a pickle")
            method(self)
        raise EOFError("it is cut off")

    def is_complete(self) -> bool:
        return not any(kind.fields for _, kind in self._empty.values())

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(value := vars(torch).get(name), (torch.dtype, torch.layout)):
            return value
        if (module, name) not in self._known:
            _refuse(f"a `{f'{module}.{name}'[:SHOWN]}`")
        return self._known[module, name]

    def _new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, _Kind) or arguments != ():
            _refuse("an object that is made in another way")
        instance: Any = object.__new__(kind.make)
        self._empty[id(instance)] = instance, kind
        self.stack.append(instance)

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Function) or type(arguments) is not tuple or len(arguments) > DIMENSIONS:
            _refuse("a call of something else than a function")
        self.stack.append(function.call(*arguments))

    def _build(self) -> None:
        state, instance = self.stack.pop(), self.stack[-1]
        made = self._empty.pop(id(instance), None)
        if made is None:
            _refuse("a state of something that has one already, or none")
        made[1].fill(instance, state)

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            _refuse("items of something else than a list")
        self.stack[-1].extend(values)

    def _update(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        # the hash of a tuple in a tuple in a tuple ... ends the process
        if type(target) is not dict or not self._keys.issuperset(map(type, keys)):
            _refuse("a dictionary with keys that are not names")
        target.update(zip(keys, items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{getattr(pickle, name)[0]: _PythonReader.dispatch[getattr(pickle, name)[0]] for name in OPERATIONS},
        pickle.FRAME[0]: lambda self: self.read(8),
        pickle.NEWOBJ[0]: _new,
        pickle.REDUCE[0]: _call,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._update([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._update(self.pop_mark()),
    }


def _check(metadata: Metadata) -> None:
    """Compare the parts with each other: nothing may claim more than there is."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    stored: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if not isinstance(info, torch_private.StorageInfo) or not hasattr(index, "fqn"):
            _refuse("a place of something that is not in a file")
        unlimited = LARGEST if info.transform_descriptors else 0  # compressed
        stored[index.fqn] = stored.get(index.fqn, 0) + info.length + unlimited
    seen: set[int] = set()
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            if id(entry.chunks) in seen:
                _refuse("chunks that belong to several tensors")
            seen.add(id(entry.chunks))
            _check_tensor(key, entry, stored.get(key, 0))
        elif not isinstance(entry, BytesStorageMetadata):
            _refuse(f"something else than a tensor or a value for {key[:SHOWN]!r}")
    for path in (metadata.planner_data or {}).values():
        keys = path if type(path) is tuple and len(path) <= DIMENSIONS else [None]
        if not all(isinstance(key, str) or _is_size(key) for key in keys):
            _refuse("a place that is not a tuple of names and numbers")


def _check_tensor(key: Any, entry: Any, stored: int) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    size, total = tuple(entry.size), 0
    for chunk in entry.chunks:
        if not isinstance(chunk, ChunkStorageMetadata) or len(chunk.sizes) != len(size):
            _refuse(f"chunks of {str(key)[:SHOWN]!r} that are none of it")
        ends = (first + length for first, length in zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > whole for end, whole in zip(ends, size, strict=True)):
            _refuse(f"chunks of {str(key)[:SHOWN]!r} that are larger than it")
        total += math.prod(chunk.sizes)
    if total != math.prod(size):
        raise CheckpointError(f"gives {str(key)[:SHOWN]!r} {math.prod(size)} elements, and {total} in files")
    if total * entry.properties.dtype.itemsize > min(stored, LARGEST - 1):
        raise CheckpointError(f"gives {str(key)[:SHOWN]!r} {total} elements in {stored} bytes of files")
