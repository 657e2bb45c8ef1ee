"""Offloaded weights in files: every dtype and shape is loaded; damaged files are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.base import CheckpointError, ConfigurationError, MissingPackageError, Package
from accelerate.weights import (
    INDEX,
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    make_folder,
    offload_state_dict,
    offload_weight,
    quantize_and_offload_8bit,
    read_index,
    read_weight_map,
    save_offload_index,
)

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "brain": torch.ones(2, dtype=torch.bfloat16),
    "eight": torch.ones(2).to(torch.float8_e4m3fn),
    "count": torch.tensor(3),
    "flag": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "complex": torch.tensor([1 + 2j]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_offloaded_tensor_is_loaded_unchanged(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    index = offload_weight(tensor, name, tmp_path / "made", {})
    assert index == {name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}}
    path = tmp_path / "made" / f"{name}.dat"
    assert path.stat().st_size == max(1, tensor.numel() * tensor.element_size())
    found = load_offloaded_weight(path, index[name])
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))


def test_changes_do_not_reach_the_file(tmp_path: Path) -> None:
    index: Any = offload_weight(torch.ones(3), "a", tmp_path, {})
    load_offloaded_weight(tmp_path / "a.dat", index["a"]).zero_()
    assert load_offloaded_weight(tmp_path / "a.dat", index["a"]).tolist() == [1, 1, 1]


def test_without_an_index_none_is_returned(tmp_path: Path) -> None:
    assert offload_weight(torch.ones(3), "a", tmp_path) is None
    assert (tmp_path / "a.dat").exists()


def test_a_cut_off_or_missing_file_is_named(tmp_path: Path) -> None:
    index: Any = offload_weight(torch.ones(3), "a", tmp_path, {})
    (tmp_path / "a.dat").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match=r"a\.dat has 5 bytes instead of 12"):
        load_offloaded_weight(tmp_path / "a.dat", index["a"])
    with pytest.raises(CheckpointError, match=r"b\.dat is missing"):
        load_offloaded_weight(tmp_path / "b.dat", index["a"])


def test_a_mapped_tensor_keeps_its_values_when_its_file_is_rewritten(tmp_path: Path) -> None:
    index: dict[str, Any] = {}
    offload_weight(torch.ones(50000), "w", tmp_path, index)
    mapped = load_offloaded_weight(tmp_path / "w.dat", index["w"])
    offload_weight(torch.zeros(2), "w", tmp_path, index)
    assert mapped.sum() == 50000
    assert [path.name for path in tmp_path.iterdir()] == ["w.dat"]


def test_tensors_on_meta_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="w has no values to write"):
        offload_weight(torch.ones(2, device="meta"), "w", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_loader_joins_memory_and_files(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "raw", {"x.y": torch.ones(2), "z": torch.zeros(1)})
    save_file({"other": torch.full((2,), 3.0)}, tmp_path / "m.safetensors")
    loader = OffloadedWeightsLoader({"z": torch.full((1,), 9.0)}, tmp_path / "raw")
    assert list(loader) == loader.all_keys == ["z", "x.y"]
    assert (loader["z"].item(), loader["x.y"].tolist(), len(loader)) == (9, [1, 1], 2)
    entry = {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "other", "dtype": "float16"}
    loader = OffloadedWeightsLoader(index={"w": entry})
    assert loader["w"].dtype == torch.float16
    assert loader["w"].tolist() == [3, 3]
    with pytest.raises(KeyError):
        loader["nope"]


def test_mistakes_of_the_loader_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pass state_dict, save_folder or index"):
        OffloadedWeightsLoader()
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ConfigurationError, match="a is stored in a raw file"):
        OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [1]}})["a"]
    broken = OffloadedWeightsLoader(index={"a": {"safetensors_file": str(tmp_path / "no")}})
    with pytest.raises(CheckpointError, match="no cannot be read as safetensors"):
        broken["a"]


def test_the_weights_of_one_module() -> None:
    dataset = {"x.y": torch.ones(1), "xz": torch.ones(1), "x.x.y": torch.zeros(1)}
    part = PrefixedDataset(dataset, "x.")
    assert list(part) == ["x.y", "x.x.y"]
    assert len(part) == 2
    assert part["y"].item() == 1
    assert part["x.y"].item() == 0, "the module may have a child of its own name"
    assert sorted(dict(PrefixedDataset({"x.y": torch.ones(1)}, "x."))) == ["x.y"]


def test_entries_of_modules() -> None:
    state = {"a": 1, "a.b": 2, "ab": 3, "c.d": 4, "a.b.c": 5}
    assert extract_submodules_state_dict(state, ["a.b", "c"]) == {"a.b": 2, "a.b.c": 5, "c.d": 4}
    assert extract_submodules_state_dict(state, ["ab"]) == {"ab": 3}


def test_offloaded_weights_are_loaded_into_a_model(tmp_path: Path) -> None:
    model, source = nn.Linear(2, 3, device="meta"), nn.Linear(2, 3)
    offload_state_dict(tmp_path, source.state_dict())
    index = json.loads((tmp_path / "index.json").read_text())
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model.weight, source.weight)
    load_offloaded_weights(nn.Linear(2, 3, device="meta"), {}, tmp_path / "nowhere")


WEIGHT = torch.tensor([[1.0, -2.0], [0.25, 0.125]])


class Int8Params(nn.Parameter):
    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **scales: Any) -> Any:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.CB, made.SCB = scales.get("CB"), scales.get("SCB")
        return made

    def to(self, device: Any) -> Int8Params:
        data = torch.Tensor.to(self.data, device)
        return Int8Params(data, CB=data, SCB=None if self.SCB is None else self.SCB.to(device))


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        assert matrix.dtype == torch.float16
        scales = matrix.float().abs().amax(dim=1)
        return torch.round(matrix.float() * 127 / scales[:, None]).to(torch.int8), scales, None

    functional: Any = ModuleType("bitsandbytes.functional")
    functional.int8_vectorwise_quant = quantize
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    monkeypatch.setattr(Package, "version", lambda self: "0.50.2")


def build() -> Any:
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.weight = Int8Params(torch.empty(2, 2, device="meta"))
    model.norm = nn.LayerNorm(2)
    return model


def test_a_weight_is_quantized_stored_and_read_back(bitsandbytes: None, tmp_path: Path) -> None:
    model, index = build(), {}
    quantize_and_offload_8bit(model, WEIGHT, "layer.weight", torch.float16, tmp_path, index, None)
    assert index == {
        "layer.weight": {"dtype": "int8", "shape": [2, 2]},
        "layer.SCB": {"dtype": "float32", "shape": [2]},
    }
    assert model.layer.weight.device.type == "meta"
    save_offload_index(index, tmp_path)
    load_offloaded_weights(model, index, tmp_path)
    assert model.layer.weight.tolist() == [[64, -127], [127, 64]]
    assert model.layer.weight.SCB.tolist() == [2.0, 0.25]


def test_a_quantized_weight_is_stored_with_its_scales(tmp_path: Path) -> None:
    model, index = build(), {}
    value, scales = torch.ones(2, 2).to(torch.int8), torch.tensor([0.5, 0.25])
    quantize_and_offload_8bit(model, value, "layer.weight", torch.float16, tmp_path, index, scales)
    load_offloaded_weights(model, index, tmp_path)
    assert model.layer.weight.tolist() == [[1, 1], [1, 1]]
    assert model.layer.weight.SCB.tolist() == [0.5, 0.25]


def test_other_parameters_are_stored_unchanged(tmp_path: Path) -> None:
    model, index = build(), {}
    quantize_and_offload_8bit(
        model, torch.tensor([3.0, 4.0]), "norm.weight", "float16", tmp_path, index, None
    )
    assert index == {"norm.weight": {"dtype": "float16", "shape": [2]}}
    assert (model.norm.weight.device.type, model.norm.weight.dtype) == ("meta", torch.float16)


def test_without_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "version", lambda self: None)
    with pytest.raises(MissingPackageError, match="bitsandbytes"):
        quantize_and_offload_8bit(build(), WEIGHT, "layer.weight", None, tmp_path, {}, None)


RAW = {"dtype": "float32", "shape": [2]}
MAPPED = {"safetensors_file": "model.safetensors", "weight_name": "a"}


def test_entries_are_added(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert not list(tmp_path.iterdir())
    save_offload_index({"a": RAW, "b": RAW}, tmp_path)
    save_offload_index({"b": MAPPED}, tmp_path)
    assert read_index(tmp_path / INDEX) == {"a": RAW, "b": MAPPED}
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "cannot be read"),
        ("[1]", "not an index of weights: it holds a list"),
        ("7", "not an index of weights: it holds a int"),
        ({"a": RAW, "b": 3}, "damaged: b without"),
        ({"c": {"shape": [2]}}, "damaged: c without"),
        ({"c": {"dtype": 3, "shape": [2]}}, "damaged: c without"),
        ({"c": {"dtype": "float32", "shape": [-2]}}, "damaged: c without"),
        ({"c": {"dtype": "float32", "shape": "2"}}, "damaged: c without"),
        ({"c": {"safetensors_file": 3}}, "damaged: c without"),
        ({"c": {"safetensors_file": "a\0b"}}, "damaged: c without"),
        ({"../c": RAW}, "names the weight '../c', and the name of its file has a component '..'"),
        ({"/c": RAW}, "names the weight '/c', and the name of its file is an absolute path"),
        ({"c\0": RAW}, "its file contains a NUL character"),
        ("[" * 100_000, "cannot be read as an index"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: Any, named: str) -> None:
    path = tmp_path / INDEX
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=named) as caught:
        read_index(path)
    assert str(path) in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    make_folder(tmp_path / "a" / "b")  # it may be there
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot be a folder for weights"):
        make_folder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_offload_index({"a": RAW}, tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ([1], "holds no dictionary 'weight_map'"),
        ({}, "holds no dictionary 'weight_map'"),
        ({"weight_map": ["a"]}, "holds no dictionary 'weight_map'"),
        ({"weight_map": None}, "holds no dictionary 'weight_map'"),
        ({"metadata": {}, "a": "b"}, "'metadata' is stored in {}, which is not text but of type dict"),
        ({"a": "../b"}, r"'a' is stored in '\.\./b', which has a component '\.\.'"),
        ({"a": "/etc/passwd"}, "which is an absolute path"),
        ({"weight_map": {"a": 3}}, "'a' is stored in 3, which is not text but of type int"),
        ({"weight_map": {"a": ["b"]}}, "which is not text but of type list"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'a' is stored in '/etc/passwd', which is an absolute path"),
        ({"weight_map": {"a": "../b"}}, r"'a' is stored in '\.\./b', which has a component '\.\.'"),
        ({"weight_map": {"a": "b\0"}}, "which contains a NUL character"),
    ],
)
def test_a_weight_map_with_files_outside_its_folder_is_refused(
    tmp_path: Path, content: Any, named: str
) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=named) as caught:
        read_weight_map(path)
    assert str(path) in str(caught.value)


def test_a_weight_map_names_files_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "x/b.bin"}}))
    assert read_weight_map(path) == {"a": "a.safetensors", "b": "x/b.bin"}
    path.write_text(json.dumps({"a": "a.safetensors", "b": "x/b.bin"}))
    assert read_weight_map(path) == {"a": "a.safetensors", "b": "x/b.bin"}
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weight_map(tmp_path / "none.index.json")


def test_a_weight_in_a_file_may_have_its_own_name_and_dtype(tmp_path: Path) -> None:
    entry = {"safetensors_file": "model.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"a": entry}))
    assert read_index(tmp_path / INDEX) == {"a": entry}
