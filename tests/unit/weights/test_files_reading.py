"""Files of weights: names and shapes are read at once, values on request; damaged files are named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accelerate.base import CheckpointError
from accelerate.weights import DTYPES, MappedFile, load_state_dict, open_weights, write_safetensors


def test_every_dtype_is_read_unchanged(tmp_path: Path) -> None:
    state = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype) if dtype != torch.bool else torch.eye(2).bool()
        for dtype in DTYPES.values()
    }
    state |= {"none": torch.empty(0, 3), "one": torch.tensor(3.5)}
    save_file(state, tmp_path / "x.safetensors", metadata={"format": "pt"})
    opened = MappedFile(tmp_path / "x.safetensors")
    for name, tensor in state.items():
        read = opened.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        assert read.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_values_are_read_for_devices_unknown_to_the_format(tmp_path: Path, name: str) -> None:
    state = {"w": torch.ones(2, 3)}
    if name.endswith("safetensors"):
        save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name)
    weights = open_weights(tmp_path / name)
    assert weights.read("w", torch.device("meta")).device.type == "meta"
    assert weights.read("w", torch.device("cpu")).tolist() == state["w"].tolist()


def in_use(path: Path) -> int:
    with open("/proc/self/maps") as maps:
        return sum(str(path) in line for line in maps)


def test_memory_is_unmapped_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(5000), "b": torch.full((5000,), 2.0)}, path)
    opened = MappedFile(path)
    assert in_use(path) == 0
    a, b = opened.read("a"), opened.read("b")
    assert in_use(path) == 2
    a.zero_()
    assert opened.read("a").sum() == 5000, "changes do not reach the file"
    assert b.sum() == 10000
    del a, b
    assert in_use(path) == 0


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {}},
        entry(shape=[3]),
        entry(data_offsets=[0, 800]),
        entry(data_offsets=[8, 0]),
        entry(data_offsets=[-8, 0]),
    ],
    ids=str,
)
def test_an_invalid_header_raises_an_error(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match="x cannot be read as safetensors"):
        MappedFile(tmp_path / "x")


def test_an_unknown_dtype_only_prevents_reading_its_tensor(tmp_path: Path) -> None:
    text = json.dumps({**entry(), "b": {"dtype": "F4", "shape": [4], "data_offsets": [8, 10]}}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(10))
    opened = MappedFile(tmp_path / "x")
    assert opened.read("a").tolist() == [0, 0]
    with pytest.raises(CheckpointError, match="b of .*x has a dtype that this torch does not support"):
        opened.read("b")


def test_a_missing_or_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (None, b"", b"torn", (99).to_bytes(8, "little") + b"{}"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            MappedFile(path)
    save_file({"a": torch.ones(2)}, path)
    opened = MappedFile(path)
    with pytest.raises(CheckpointError, match="x has no tensor of the name b"):
        opened.read("b")
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="a cannot be read from"):
        opened.read("a")


def test_the_file_that_was_opened_is_read(tmp_path: Path) -> None:
    """Training may save where it has loaded from."""
    path, other = tmp_path / "x", tmp_path / "y"
    save_file({"a": torch.ones(2)}, path)
    opened = MappedFile(path)
    save_file({"b": torch.ones(9), "a": torch.zeros(2)}, other)
    other.replace(path)
    assert opened.read("a").tolist() == [1, 1]
    assert copy.deepcopy(opened).read("a").tolist() == [0, 0]
    path.unlink()
    assert opened.read("a").tolist() == [1, 1]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
    ],
)
def test_headers_with_other_values_than_sizes_are_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        MappedFile(tmp_path / "x.safetensors")


def test_a_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    header = b"[" * 100_000
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        MappedFile(tmp_path / "x.safetensors")


CPU = torch.device("cpu")
STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def write(path: Path, state: Any = STATE, **options: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, **options)
    return path


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_names_shapes_and_values(tmp_path: Path, name: str) -> None:
    opened = open_weights(write(tmp_path / name))
    assert dict(opened.shapes) == {"a": torch.Size([2, 3]), "b": torch.Size([2])}
    assert all(torch.equal(opened.read(each, CPU), tensor) for each, tensor in STATE.items())


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_changes_do_not_reach_the_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    open_weights(path).read("a", CPU).zero_()
    assert torch.equal(open_weights(path).read("a", CPU), STATE["a"])


def test_a_file_of_torch_may_be_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin", {"a": torch.ones(50000)})
    read = open_weights(path).read("a", CPU)
    torch.save({"a": torch.zeros(2)}, path)
    assert read.sum() == 50000


def test_files_of_old_versions_of_torch_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(open_weights(path).read("a", CPU), STATE["a"])


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_a_broken_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=f"{path} cannot be read"):
        open_weights(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} is missing"):
        open_weights(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [([1, 2], "holds a list"), ({"model": {"a": torch.ones(1)}, "epoch": 3}, "holds 'model', a dict")],
)
def test_files_with_other_values_than_tensors_are_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{message}, and not only tensors by name"):
        open_weights(write(tmp_path / "x.bin", content))


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_a_state_dict_as_a_whole(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"m.a": torch.ones(2), "n.b": torch.zeros(1)})
    assert sorted(load_state_dict(path)) == ["m.a", "n.b"]
    placed = load_state_dict(path, {"m": "meta", "n": "disk"})
    assert [placed[each].device.type for each in ("m.a", "n.b")] == ["meta", "cpu"]


def test_shared_tensors_stay_shared_on_one_device(tmp_path: Path) -> None:
    write_safetensors({"a": STATE["a"], "b": STATE["a"]}, tmp_path / "x.safetensors")
    together = load_state_dict(tmp_path / "x.safetensors", {"": "cpu"})
    assert together["a"] is together["b"]


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_a_released_file_is_not_mapped_and_can_be_read_again(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"a": torch.ones(5000)})
    opened = open_weights(path)
    assert opened.read("a", CPU).sum() == 5000
    opened.release()
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    assert opened.read("a", CPU).sum() == 5000


def test_a_zip_file_on_several_disks_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin")
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x06\x07")  # where zip64 says how many disks there are
    content[place + 16] = 5
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.bin cannot be read"):
        open_weights(path)


def test_a_tensor_can_be_a_parameter_and_an_extra_state(tmp_path: Path) -> None:
    shared = torch.rand(2)
    write_safetensors({"a": shared, "m._extra_state": shared}, tmp_path / "w.safetensors")
    file = open_weights(tmp_path / "w.safetensors")
    assert list(file.shapes) == ["a"]
    assert list(file.extra) == ["m._extra_state"]
    assert torch.equal(file.read("m._extra_state", CPU), shared)
