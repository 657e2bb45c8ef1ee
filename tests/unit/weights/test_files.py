"""State dicts in files: what is loaded, what is refused, and that no code is run."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.stand_ins.objects import CreatesFolder
from torch import nn

from accelerate.base import CheckpointError, ConfigurationError
from accelerate.weights import (
    clean_state_dict_for_safetensors,
    load,
    read_safetensors,
    read_torch,
    refused_values,
    save,
    write_safetensors,
    write_torch,
)

pytestmark = pytest.mark.usefixtures("states")


def tied() -> dict[str, torch.Tensor]:
    weight = torch.arange(6.0).view(2, 3)
    return {"a": weight, "b": weight, "c": weight.t(), "empty": torch.empty(0), "half": torch.ones(2).half()}


def test_shared_tensors_are_stored_once_and_loaded_shared(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(tied(), path)
    assert sorted(load_file(path)) == ["a", "c", "empty", "half"]
    state = read_safetensors(path)
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: tensor.tolist() for name, tensor in tied().items()
    }
    assert state["a"].data_ptr() == state["b"].data_ptr()


def test_other_values_than_tensors_are_refused_by_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="step='int': safetensors holds tensors only"):
        write_safetensors({"step": 3}, tmp_path / "x")  # type: ignore[dict-item]


def test_clean_state_dict_drops_the_other_names() -> None:
    from accelerate.state import PartialState

    PartialState(cpu=True)
    cleaned = clean_state_dict_for_safetensors(tied())
    assert sorted(cleaned) == ["a", "c", "empty", "half"]
    assert all(tensor.is_contiguous() for tensor in cleaned.values())


def test_a_malicious_file_runs_no_code(tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "x.bin"
    torch.save({"state": CreatesFolder(mark)}, path)
    with pytest.raises(CheckpointError, match=r"x\.bin holds a .*mkdir.*weights_only"):
        read_torch(path)
    assert not mark.exists()
    read_torch(path, weights_only=False)
    assert mark.exists()


def test_threads_read_arrays_at_the_same_time() -> None:
    arrays = [{"state": np.arange(4)} for _ in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(refused_values, arrays)) == [{}] * len(arrays)


def test_arrays_of_numbers_are_read(tmp_path: Path) -> None:
    write_torch({"state": np.random.get_state(), "x": np.arange(3)}, tmp_path / "x")
    assert read_torch(tmp_path / "x")["x"].tolist() == [0, 1, 2]


def halve(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def replace(data: bytes) -> bytes:
    return b"x" * 99


@pytest.mark.parametrize("read", [read_torch, read_safetensors])
@pytest.mark.parametrize("damage", [halve, empty, replace])
def test_a_broken_file_is_named(tmp_path: Path, read: Any, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "broken"
    (write_torch if read is read_torch else write_safetensors)({"a": torch.ones(99)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="broken"):
        read(path)


def test_save_keeps_the_old_file_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.bin"
    save({"a": 1}, path)

    def fail(*args: Any) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save({"a": 2}, path)
    assert load(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.bin"]


def test_save_takes_file_objects_but_not_for_safetensors() -> None:
    buffer = io.BytesIO()
    save(nn.Linear(1, 1).state_dict(), buffer)
    buffer.seek(0)
    assert sorted(load(buffer)) == ["bias", "weight"]
    with pytest.raises(ConfigurationError, match="needs the path of a file"):
        save({}, buffer, safe_serialization=True)


@pytest.mark.parametrize("write", [write_torch, write_safetensors])
def test_a_file_cut_at_any_byte_is_named(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "short"
    write({"a": torch.ones(9), "b": torch.zeros(3, dtype=torch.int8)}, path)
    data = path.read_bytes()
    read = read_torch if write is write_torch else read_safetensors
    for length in {*range(0, len(data), 7), *range(len(data) - 60, len(data))}:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"short cannot be read"):
            read(path)


def test_a_missing_file_raises_the_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a", torch.ones(2, device="meta"), "a='a tensor on the meta device': it has no values"),
        ("a", torch.eye(2).to_sparse(), "a=torch.sparse_coo: safetensors holds dense tensors only"),
        ("a", torch.ones(2, dtype=torch.complex128), "a=torch.complex128: safetensors has no such dtype"),
        ("a", {"b": torch.ones(1)}, "a='dict': safetensors holds tensors only"),
        (1, torch.ones(1), "name=1: safetensors does not support this name"),
        ("__metadata__", torch.ones(1), "name='__metadata__'"),
    ],
)
def test_states_that_safetensors_cannot_store_are_refused(
    tmp_path: Path, name: Any, value: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        write_safetensors({name: value, "b": torch.ones(1)}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_views_of_one_memory_keep_their_values(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    wave = torch.tensor([1 + 2j, 3 - 1j])
    state = {
        "whole": whole,
        "row": whole[1],
        "column": whole[:, 1],
        "turned": whole.t(),
        "tied": whole.view(3, 4),
        "spread": torch.ones(1).expand(5),
        "wave": wave,
        "mirrored": wave.conj(),
        "other dtype": whole.view(torch.int32),
    }
    write_safetensors(state, tmp_path / "x")
    found = read_safetensors(tmp_path / "x")
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []


def test_clean_state_dict_needs_no_run() -> None:
    assert sorted(clean_state_dict_for_safetensors(tied())) == ["a", "c", "empty", "half"]


@pytest.mark.parametrize("seed", range(12))
def test_damaged_files_of_torch_are_named(tmp_path: Path, seed: int) -> None:
    """The error names the file, for any error that torch raises."""
    import random

    chance, path = random.Random(seed), tmp_path / "torn.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for content in (b"torn", whole[: chance.randrange(len(whole))], chance.randbytes(40)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"torn\.bin"):
            read_torch(path)
