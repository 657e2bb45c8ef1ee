"""Whatever bytes a file has: it is read, or an error of this package refuses it, and nothing is changed."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from safetensors.torch import save
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accelerate.base import AccelerateError, CheckpointError
from accelerate.checkpointing import CheckpointReader, ModelPart, OptimizerPart, apply_all, shard_index
from accelerate.weights import (
    MappedFile,
    open_weights,
    read_index,
    read_safetensors,
    read_torch,
    read_weight_map,
)


@contextmanager
def file_of(content: bytes, name: str = "file.bin") -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        yield path


def attempt(action: Callable[[], Any]) -> None:
    with suppress(AccelerateError):
        action()


@st.composite
def mutations(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with bytes replaced, removed, repeated or cut off."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(changed) - 1, 0)))
        length = draw(st.integers(0, 9))
        changed[place : place + length] = draw(
            st.one_of(st.binary(max_size=9), st.just(bytes(changed[:length])))
        )
    return bytes(changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed)


# Metadata of sharded checkpoints


def stored() -> Metadata:
    properties, size = TensorProperties(torch.float32), torch.Size((4, 3))
    chunks = [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((2, 3))) for row in (0, 2)]
    files: dict[Any, Any] = {
        MetadataIndex("model.a", chunk.offsets, place): _StorageInfo(f"__{place}_0.distcp", 8, 1000)
        for place, chunk in enumerate(chunks)
    }
    files[MetadataIndex("model.b")] = _StorageInfo("__0_0.distcp", 0, 8)
    entries: dict[str, Any] = {
        "model.a": TensorStorageMetadata(properties, size, chunks),
        "model.b": BytesStorageMetadata(),
    }
    return Metadata(entries, {"model.a": ("model", "a"), "model.b": ("model", "b")}, files)


@given(st.one_of(*(mutations(pickle.dumps(stored(), protocol)) for protocol in (2, 4))))
@example(b"\x80\x04r\xff\xff\xff\xff.")
def test_metadata_of_shards(content: bytes) -> None:
    with file_of(content, shard_index.NAME) as path:
        attempt(lambda: shard_index.read(path.parent, "model"))


@given(st.binary(max_size=200))
def test_programs_of_any_bytes(content: bytes) -> None:
    with file_of(b"\x80\x04" + content, shard_index.NAME) as path:
        attempt(lambda: shard_index.read(path.parent, "model"))


# Weights


WEIGHTS = save(
    {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int64)},
    {"format": "pt", "aliases": json.dumps({"c": "a"})},
)
HEADER = WEIGHTS[8 : 8 + int.from_bytes(WEIGHTS[:8], "little")]

texts = st.text(max_size=9) | st.just("a")
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=9,
)


@st.composite
def replaced(draw: st.DrawFn, content: Any, value: st.SearchStrategy[Any]) -> Any:
    """The content with values exchanged somewhere in it."""
    changed = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 2))):
        place = changed
        while isinstance(place, (dict, list)) and place:
            key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
            if draw(st.booleans()) or not isinstance(place[key], (dict, list)):
                place[key] = draw(value)
                break
            place = place[key]
    return changed


def with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + WEIGHTS[8 + len(HEADER) :]


def read_weights(path: Path) -> None:
    attempt(lambda: read_safetensors(path))

    def read_all() -> None:
        opened, mapped = open_weights(path), MappedFile(path)
        for name in opened.shapes:
            opened.read(name, torch.device("cpu"))
            located = opened.locate(name)
            assert located is not None
            mapped.read(located[1])

    attempt(read_all)
    model = nn.Linear(3, 2)
    attempt(lambda: apply_all([ModelPart(0, model=model).read(CheckpointReader(path.parent))], raise_failure))


def raise_failure(failure: str) -> None:
    if failure:
        raise CheckpointError(failure)


@given(st.one_of(mutations(HEADER).map(with_length), mutations(WEIGHTS)))
@example(b"\xff" * 8)
@example(with_length(b"[" * 100_000))
def test_files_of_safetensors(content: bytes) -> None:
    with file_of(content, "model.safetensors") as path:
        read_weights(path)


@given(replaced(json.loads(HEADER), anything))
def test_headers_with_other_values(header: Any) -> None:
    with file_of(with_length(json.dumps(header).encode()), "model.safetensors") as path:
        read_weights(path)


@given(anything)
def test_further_names_of_any_kind(aliases: Any) -> None:
    content = save({"a": torch.ones(2)}, {"aliases": json.dumps(aliases)})
    with file_of(content, "model.safetensors") as path:
        read_weights(path)


INDEX = {"metadata": {"total_size": 3}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
OFFLOADED = {
    "a": {"dtype": "float32", "shape": [2, 3]},
    "b": {"safetensors_file": "model.safetensors", "weight_name": "b"},
}


def written(content: Any) -> bytes:
    return json.dumps(content).encode()


def as_json(content: Any) -> st.SearchStrategy[bytes]:
    return replaced(content, anything).map(written)


@given(st.sampled_from([INDEX, OFFLOADED]).flatmap(lambda index: as_json(index) | mutations(written(index))))
def test_indices(content: bytes) -> None:
    with file_of(content, "index.json") as path:
        attempt(lambda: read_index(path))
        attempt(lambda: [path.parent.joinpath(name).resolve() for name in read_weight_map(path).values()])


# States


def stepped() -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


STATE = stepped().state_dict()
values = st.one_of(
    anything,
    st.just(torch.ones(2, 2)),
    st.just(torch.ones(1, 2, dtype=torch.complex64)),
    st.just(torch.ones(3).to_sparse()),
    st.just(()),
)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second)


@given(replaced(STATE, values).map(saved))
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_states_of_optimizers(content: bytes) -> None:
    optimizer = stepped()
    before = copy.deepcopy(optimizer.state_dict())
    with file_of(content, "optimizer.bin") as path:
        try:
            part = OptimizerPart("optimizer.bin", optimizer, lambda: [[["weight"], ["bias"]]])
            change = part.read(CheckpointReader(path.parent))
        except AccelerateError:
            assert same(before, optimizer.state_dict())
        else:
            change.apply()
            stepped_ones = [(each, entry) for each, entry in optimizer.state.items() if entry]
            assert all(
                entry["exp_avg"].shape == each.shape
                for each, entry in stepped_ones
                if isinstance(entry.get("exp_avg"), torch.Tensor)
            )


@given(mutations(saved(STATE)))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_files_of_torch(content: bytes) -> None:
    with file_of(content) as path:
        attempt(lambda: read_torch(path, "cpu"))
        attempt(lambda: open_weights(path))
