"""`.metadata` of torch's checkpoints is read; what a pickle could do beyond that is refused."""

from __future__ import annotations

import copyreg
import gc
import pickle
import resource
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import metadata as old
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from accelerate.base import CheckpointError
from accelerate.checkpointing import read_metadata, shard_index

DCP = "torch.distributed.checkpoint.metadata"
SAVED = (DCP, "Metadata")


def build(**changes: Any) -> Metadata:
    """A tensor in two chunks, and a value."""
    chunks = [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((2, 3))) for row in (0, 2)]
    files: dict[Any, Any] = {
        MetadataIndex("model.a", chunk.offsets, place): _StorageInfo(f"__{place}_0.distcp", 8, 1000)
        for place, chunk in enumerate(chunks)
    }
    files[MetadataIndex("model.b")] = _StorageInfo("__0_0.distcp", 0, 8)
    stored: dict[str, Any] = {
        "model.a": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((4, 3)), chunks),
        "model.b": BytesStorageMetadata(),
    }
    fields = {
        "state_dict_metadata": stored,
        "planner_data": {"model.a": ("model", "a"), "model.b": ("model", "b")},
        "storage_data": files,
        "storage_meta": StorageMeta(checkpoint_id="folder", modules=["a"]),
    }
    return Metadata(**{**fields, **changes})


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read(protocol: int) -> None:
    assert read_metadata(pickle.dumps(build(), protocol)) == build()


def test_properties_of_newer_versions_of_torch_are_left_out() -> None:
    metadata = build()
    properties = metadata.state_dict_metadata["model.a"].properties
    state = properties.__getstate__()
    vars(properties)["__getstate__"] = lambda: (*state, (3, 1))
    assert read_metadata(pickle.dumps(metadata)) == build()


def test_further_forms_of_torch_are_read() -> None:
    metadata = build(storage_meta=StorageMeta(checkpoint_id=Path("/folder")))
    metadata.state_dict_metadata = OrderedDict(metadata.state_dict_metadata)
    metadata.state_dict_metadata["model.a"].properties = old.TensorProperties(torch.float32)
    found = read_metadata(pickle.dumps(metadata))
    assert found.state_dict_metadata["model.a"].properties.dtype == torch.float32
    assert found.storage_data == metadata.storage_data


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_saved_by_torch_is_read(tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    state = {"model": {"a": torch.ones(3), "deep": {"b": [torch.zeros(2), 3]}}, "step": 4}
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    content = (tmp_path / shard_index.NAME).read_bytes()
    wanted = pickle.loads(content)
    wanted.storage_meta.checkpoint_id = None  # where it was saved, which is not read
    assert read_metadata(content) == wanted


# Programs


def text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def program(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + pickle.STOP


STATE = pickle.EMPTY_DICT + text("hacked") + pickle.NEWTRUE + pickle.SETITEM
SLOTS = pickle.NONE + STATE + pickle.TUPLE2
NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ
ONE = pickle.BININT1 + b"\1"
DEEP = pickle.EMPTY_TUPLE + pickle.TUPLE1 * 1_000_000
METADATA = named(*SAVED) + NEW

PROGRAMS: dict[str, bytes] = {
    "state of a class": named(*SAVED) + STATE + pickle.BUILD,
    "slots of a class": named(*SAVED) + SLOTS + pickle.BUILD,
    "state of an enum": named(DCP, "_MEM_FORMAT_ENCODING") + STATE + pickle.BUILD,
    "state of a member": named(DCP, "_MEM_FORMAT_ENCODING")
    + pickle.BININT1
    + b"\0"
    + pickle.TUPLE1
    + pickle.REDUCE
    + STATE
    + pickle.BUILD,
    "state of a dtype": named("torch", "float32") + STATE + pickle.BUILD,
    "slots of a dtype": named("torch", "float32") + SLOTS + pickle.BUILD,
    "state of a size class": named("torch", "Size") + STATE + pickle.BUILD,
    "state of a function": named("torch.serialization", "_get_layout") + STATE + pickle.BUILD,
    "slots of an instance": METADATA + SLOTS + pickle.BUILD,
    "an unknown field": METADATA + STATE + pickle.BUILD,
    "two states": METADATA + pickle.EMPTY_DICT + pickle.BUILD + pickle.EMPTY_DICT + pickle.BUILD,
    "no state": METADATA,
    "a state that is no dictionary": METADATA + ONE + pickle.BUILD,
    "items of a class": named(*SAVED) + text("a") + ONE + pickle.SETITEM,
    "items of an enum": named(DCP, "_MEM_FORMAT_ENCODING") + text("a") + ONE + pickle.SETITEM,
    "appended to an instance": METADATA + ONE + pickle.APPEND,
    "a call of a class": named(*SAVED) + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "arguments of a class": named(*SAVED) + ONE + pickle.TUPLE1 + pickle.NEWOBJ,
    "a new size": named("torch", "Size") + NEW,
    "an odd layout": named("torch.serialization", "_get_layout")
    + text("load")
    + pickle.TUPLE1
    + pickle.REDUCE,
    "a layout that imports": named("torch.serialization", "_get_layout")
    + text("torch.onnx")
    + pickle.TUPLE1
    + pickle.REDUCE,
    "a size of texts": named("torch", "Size") + text("ab") + pickle.TUPLE1 + pickle.TUPLE1 + pickle.REDUCE,
    "a negative size": named("torch", "Size")
    + pickle.BININT
    + b"\xff" * 4
    + pickle.TUPLE1
    + pickle.TUPLE1
    + pickle.REDUCE,
    "a member of several arguments": named(DCP, "_MEM_FORMAT_ENCODING")
    + text("Made")
    + text("a b")
    + pickle.TUPLE2
    + pickle.REDUCE,
    "an enum by a deep key": named(DCP, "_MEM_FORMAT_ENCODING") + DEEP + pickle.TUPLE1 + pickle.REDUCE,
    "a factory": named("collections", "defaultdict") + named("torch", "Size") + pickle.TUPLE1 + pickle.REDUCE,
    "a module of torch": named("torch.distributed.checkpoint.state_dict_saver", "Metadata") + NEW,
    "a dotted name": named(DCP, "Metadata.__init__") + NEW,
    "a subclass of text": named("builtins", "getattr"),
    "an object of another file": ONE + pickle.BINPERSID,
    "an object by a text": pickle.PERSID + b"name\n",
    "an instance of old": pickle.INST + b"os\nsystem\n",
    "an object of old": pickle.MARK + named(*SAVED) + pickle.OBJ,
    "an object with names": named(*SAVED) + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX,
    "a code of an extension": pickle.EXT1 + b"\1",
    "a long code of an extension": pickle.EXT4 + b"\1\0\0\0",
    "many bytes": pickle.BINBYTES8 + (2**50).to_bytes(8, "little"),
    "many changeable bytes": pickle.BYTEARRAY8 + (2**50).to_bytes(8, "little"),
    "a long number": pickle.LONG4 + (2**31 - 1).to_bytes(4, "little"),
    "a long text": pickle.BINUNICODE + (2**32 - 1).to_bytes(4, "little"),
    "a long text of eight": pickle.BINUNICODE8 + (2**62).to_bytes(8, "little"),
    "a long frame": pickle.FRAME + (2**62).to_bytes(8, "little"),
    "a far place": pickle.NONE + pickle.LONG_BINPUT + b"\xff" * 4,
    "a far place in text": pickle.NONE + pickle.PUT + b"99999999999\n",
    "a place of nothing": pickle.BINGET + b"\7",
    "an index without fields": pickle.EMPTY_DICT + named(DCP, "MetadataIndex") + NEW + ONE + pickle.SETITEM,
    "a deep set": pickle.EMPTY_SET + pickle.MARK + DEEP + pickle.ADDITEMS,
    "deep lists": pickle.EMPTY_LIST * 100_000 + pickle.APPEND * 99_999,
    "doubled tuples": METADATA
    + pickle.EMPTY_DICT
    + text("version")
    + pickle.EMPTY_TUPLE
    + (pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2) * 100
    + pickle.SETITEM
    + pickle.BUILD,
    "doubled names": METADATA
    + pickle.EMPTY_TUPLE
    + (pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2) * 100
    + pickle.BUILD,
    "nothing": b"",
    "a number": ONE,
    "an empty stack": pickle.TUPLE3,
}


def attributes() -> dict[str, Any]:
    """The attributes of the classes that such a file names."""
    kinds = (
        *(Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata),
        *(StorageMeta, TensorProperties, _StorageInfo, dcp._MEM_FORMAT_ENCODING, old.MEM_FORMAT_ENCODING),
        *(torch.Size, torch.dtype, OrderedDict, defaultdict),
    )
    found = {kind.__qualname__: dict(vars(kind)) for kind in kinds}
    found["members"] = {member: dict(vars(member)) for member in dcp._MEM_FORMAT_ENCODING}
    found["layouts"] = dict(vars(torch.serialization._get_layout))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_malicious_pickle_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    before, most = attributes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / shard_index.NAME).write_bytes(program(PROGRAMS[name]))
    with pytest.raises(CheckpointError, match=r"/\.metadata ") as caught:
        shard_index.read(tmp_path, "model")
    assert len(str(caught.value)) < 1000
    assert attributes() == before
    assert gc.isenabled()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 500_000, "kilobytes"


def test_a_registered_extension_is_refused(tmp_path: Path) -> None:
    copyreg.add_extension("builtins", "print", 0x77)
    try:
        (tmp_path / shard_index.NAME).write_bytes(
            program(pickle.EXT1 + b"\x77", pickle.EMPTY_TUPLE, pickle.REDUCE)
        )
        with pytest.raises(CheckpointError, match="holds the operation EXT1"):
            shard_index.read(tmp_path, "model")
    finally:
        copyreg.remove_extension("builtins", "print", 0x77)


class Reduced:
    """Is pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


class Dictionary(dict[str, Any]):
    def __setstate__(self, state: Any) -> None:
        raise AssertionError("it was called")


def put(field: str, key: Any, value: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        getattr(metadata, field)[key] = value

    return change


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor(size: tuple[int, ...], *chunks: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), list(chunks))


INDEX = MetadataIndex("model.b")
LARGE, MANY = (2**40,), (1,) * 1000

CHANGES: dict[str, Callable[[Metadata], None]] = {
    "another object": put("state_dict_metadata", "model.a", Reduced(print, ("it was called",))),
    "a dictionary of another kind": put("planner_data", "model.a", Dictionary(a=1)),
    "a factory": put("planner_data", "model.a", defaultdict(list)),
    "a number as entry": put("state_dict_metadata", "model.a", 3),
    "a number as name": put("state_dict_metadata", 3, BytesStorageMetadata()),
    "a number as place": put("planner_data", "model.a", 3),
    "a place of tuples": put("planner_data", "model.a", ("model", ("a",))),
    "a long place": put("planner_data", "model.a", ("model",) * 1000),
    "a name as index": put("storage_data", "model.a", _StorageInfo("a", 0, 1)),
    "a number as file": put("storage_data", INDEX, 3),
    "a file above": put("storage_data", INDEX, _StorageInfo("../a", 0, 1)),
    "an absolute file": put("storage_data", INDEX, _StorageInfo("/etc/passwd", 0, 1)),
    "a file with a NUL": put("storage_data", INDEX, _StorageInfo("a\0", 0, 1)),
    "a file that is a number": put("storage_data", INDEX, _StorageInfo(3, 0, 1)),  # type: ignore[arg-type]
    "a negative offset": put("storage_data", INDEX, _StorageInfo("a", -1, 1)),
    "a negative length": put("storage_data", INDEX, _StorageInfo("a", 0, -1)),
    "a length beyond all files": put("storage_data", INDEX, _StorageInfo("a", 0, 2**70)),
    "a length that is true": put("storage_data", INDEX, _StorageInfo("a", 0, True)),
    "an odd transformation": put("storage_data", INDEX, _StorageInfo("a", 0, 1, [3])),  # type: ignore[list-item]
    "a size without chunks": put("state_dict_metadata", "model.a", tensor((2**40,))),
    "a chunk beyond the end": put("state_dict_metadata", "model.a", tensor((2,), chunk((1,), (2,)))),
    "a chunk of other dimensions": put("state_dict_metadata", "model.a", tensor((2,), chunk((0, 0), (2, 1)))),
    "a chunk that is none": put("state_dict_metadata", "model.a", tensor((2,), "chunk")),
    "too few chunks": put("state_dict_metadata", "model.a", tensor((2,), chunk((0,), (1,)))),
    "more than the files have": put(
        "state_dict_metadata", "model.a", tensor((2**40,), chunk((0,), (2**40,)))
    ),
    "many dimensions": put(
        "state_dict_metadata", "model.a", tensor((1,) * 1000, chunk((0,) * 1000, (1,) * 1000))
    ),
    "no properties": put(
        "state_dict_metadata",
        "model.a",
        TensorStorageMetadata(None, torch.Size(()), []),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    metadata = build()
    CHANGES[name](metadata)
    (tmp_path / shard_index.NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"/\.metadata (holds|gives) "):
        shard_index.read(tmp_path, "model")


def test_trusted_metadata_is_read_with_pickle(tmp_path: Path) -> None:
    metadata = build(planner_data=defaultdict(tuple, {"model.a": ("model", "a"), "model.b": ("model", "b")}))
    (tmp_path / shard_index.NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"holds a `collections\.defaultdict`.*weights_only"):
        shard_index.read(tmp_path, "model")
    assert len(shard_index.read(tmp_path, "model", trusted=True).paths) == 2


def test_chunks_of_several_tensors_are_refused() -> None:
    metadata, shared = build(), [chunk((0, 0), (4, 3))]
    for key in ("model.a", "model.c"):
        metadata.state_dict_metadata[key] = entry = tensor((4, 3))
        entry.chunks = shared
    metadata.storage_data[MetadataIndex("model.c", torch.Size((0, 0)))] = _StorageInfo("a", 0, 1000)
    with pytest.raises(CheckpointError, match="chunks that belong to several tensors"):
        read_metadata(pickle.dumps(metadata))
