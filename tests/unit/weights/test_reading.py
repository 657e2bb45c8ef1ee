"""Files of weights: names and shapes at once, values when asked; what is broken is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accelerate.base import CheckpointError
from accelerate.weights import Weights, load_state_dict, open_weights, write_safetensors

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


def test_further_names_of_a_tensor_are_names(tmp_path: Path) -> None:
    write_safetensors({"a": STATE["a"], "twin": STATE["a"]}, tmp_path / "x.safetensors")
    opened = open_weights(tmp_path / "x.safetensors")
    assert sorted(opened.shapes) == ["a", "twin"]
    assert torch.equal(opened.read("twin", CPU), STATE["a"])


def test_several_files_are_one(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.safetensors", {name: tensor}) for name, tensor in STATE.items()]
    weights = Weights.open(paths)
    assert weights.shape("b") == torch.Size([2])
    assert torch.equal(weights.read("a", CPU), STATE["a"])


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
def test_other_things_than_weights_are_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{message}, and not only tensors by name"):
        open_weights(write(tmp_path / "x.bin", content))


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_a_state_dict_as_a_whole(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"m.a": torch.ones(2), "n.b": torch.zeros(1)})
    assert sorted(load_state_dict(path)) == ["m.a", "n.b"]
    placed = load_state_dict(path, {"m": "meta", "n": "disk"})
    assert [placed[each].device.type for each in ("m.a", "n.b")] == ["meta", "cpu"]


def test_shared_tensors_stay_shared_where_they_go_together(tmp_path: Path) -> None:
    write_safetensors({"a": STATE["a"], "b": STATE["a"]}, tmp_path / "x.safetensors")
    together = load_state_dict(tmp_path / "x.safetensors", {"": "cpu"})
    assert together["a"] is together["b"]


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_a_file_that_rests_is_not_mapped_and_can_be_read_again(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"a": torch.ones(5000)})
    opened = open_weights(path)
    assert opened.read("a", CPU).sum() == 5000
    opened.rest()
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    assert opened.read("a", CPU).sum() == 5000


def test_a_file_that_says_it_lies_on_several_disks_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin")
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x06\x07")  # where zip64 says how many disks there are
    content[place + 16] = 5
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.bin cannot be read"):
        open_weights(path)
