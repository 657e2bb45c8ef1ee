"""Filling a model from files: every kind of file, every place, one error for what does not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.big_modeling import LoadOptions, check_options
from accelerate.checkpointing import save_sharded
from accelerate.devices import CPU
from accelerate.diagnostics import MemoryMeter
from accelerate.diagnostics.memory import CLEAR_REFS, MIB
from accelerate.weights import OffloadedWeightsLoader, tensor_bytes, write_safetensors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LoadOptions({"": "disk"}), "device_map=.*are not moved"),
        (LoadOptions({"": "cpu", "weight": "meta"}), "device_map=.*are not moved"),
        (LoadOptions(dtype=torch.float16), "dtype=torch.float16: parameters of this model are torch.float32"),
    ],
)
def test_contradicting_load_options_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_options(nn.Linear(2, 2), options)


def test_options_without_effect_are_allowed() -> None:
    check_options(nn.Linear(2, 2), LoadOptions({"": "cpu"}, torch.float32))


class Net(nn.Module):
    """A tied pair, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(2.0), persistent=False)


def empty() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(3)
    made = Net()
    made.norm.running_mean.add_(torch.rand(4))
    made.norm.num_batches_tracked.add_(7)
    return made


@pytest.fixture(scope="module")
def files(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in every kind of file."""
    root = tmp_path_factory.mktemp("weights")
    logging.disable(logging.WARNING)  # of names left out of safetensors, outside of a run
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "head.weight"}
    save_sharded(state, root / "safe")
    save_sharded(state, root / "safe_shards", 100)
    save_sharded(net.state_dict(), root / "torch", safe=False)
    save_sharded(net.state_dict(), root / "torch_shards", 100, safe=False)
    write_safetensors(net.state_dict(), root / "one.safetensors")
    (root / "named").mkdir()
    for path in (root / "safe_shards").iterdir():
        (root / "named" / path.name.replace("model.", "diffusion.")).write_bytes(path.read_bytes())
    logging.disable(logging.NOTSET)
    return root


KINDS = [
    "safe",
    "safe/model.safetensors",
    "safe_shards",
    "safe_shards/model.safetensors.index.json",
    "named",
    "torch",
    "torch/pytorch_model.bin",
    "torch_shards",
    "one.safetensors",
]


def equal(model: nn.Module, net: nn.Module) -> bool:
    state, expected = model.state_dict(), net.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[n], expected[n]) for n in expected)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["no map", "map"])
@pytest.mark.parametrize("start", [empty, Net])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(
    files: Path, net: Net, kind: str, start: Callable[[], Net], device_map: Any
) -> None:
    model = start()
    load_checkpoint_in_model(model, files / kind, device_map=device_map, strict=True)
    assert equal(model, net)
    assert model.head.weight is model.embed.weight
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_tensors_that_have_values_are_filled_in_place(files: Path, net: Net) -> None:
    """Those who hold them, such as an optimizer, hold the new values."""
    model = Net()
    held = dict(model.named_parameters())
    load_checkpoint_in_model(model, files / "safe")
    assert all(held[name] is parameter for name, parameter in model.named_parameters())
    assert equal(model, net)


def test_the_cpu_maps_weights_instead_of_copying_them(files: Path) -> None:
    model = empty()
    load_checkpoint_in_model(model, files / "safe")
    with open("/proc/self/maps") as maps:
        assert str(files / "safe" / "model.safetensors") in maps.read()
    with torch.no_grad():
        model.body.weight.zero_()
    again = empty()
    load_checkpoint_in_model(again, files / "safe")
    assert again.body.weight.any(), "the file is not changed through the model"


@pytest.mark.parametrize("kind", ["safe", "safe_shards", "torch"])
@pytest.mark.parametrize("buffers", [False, True])
def test_weights_on_the_disk(files: Path, net: Net, tmp_path: Path, kind: str, buffers: bool) -> None:
    model = empty()
    device_map = {"": "cpu", "norm": "disk", "body": "disk"}
    load_checkpoint_in_model(model, files / kind, device_map, tmp_path, offload_buffers=buffers)
    on_disk = {name for name, tensor in model.state_dict().items() if tensor.device.type == "meta"}
    names = {"norm.weight", "norm.bias", "body.weight", "body.bias"}
    more = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert on_disk == (names | more if buffers else names)
    stored = OffloadedWeightsLoader(save_folder=tmp_path)
    assert set(stored) == on_disk
    assert all(torch.equal(stored[name], net.state_dict()[name]) for name in stored)
    assert torch.equal(model.embed.weight, net.embed.weight)


def test_tied_weights_are_placed_together(files: Path, tmp_path: Path) -> None:
    model = empty()
    with pytest.raises(ConfigurationError, match=r"embed.weight \(cpu\) and head.weight \(disk\)"):
        load_checkpoint_in_model(model, files / "safe", {"": "cpu", "head": "disk"}, tmp_path)
    assert model.body.weight.device.type == "meta"


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path, net: Net, name: str) -> None:
    state = {
        key: value for key, value in net.state_dict().items() if key not in ("embed.weight", "head.weight")
    }
    save_file({**state, name: net.embed.weight.detach()}, tmp_path / "x.safetensors")
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "x.safetensors", {"": "cpu"}, strict=True)
    assert equal(model, net)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["no map", "map"])
@pytest.mark.parametrize("start", [empty, Net])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_dtypes(files: Path, net: Net, dtype: Any, start: Callable[[], Net], device_map: Any) -> None:
    model = start()
    load_checkpoint_in_model(model, files / "safe", device_map, dtype=dtype, keep_in_fp32_modules=["norm"])
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert kinds.pop("norm.num_batches_tracked") == torch.int64
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }
    assert torch.equal(model.body.weight, net.body.weight.bfloat16())


def test_complex_tensors_keep_their_dtype(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("frequencies", torch.tensor([1 + 2j]))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype=torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.get_buffer("frequencies"), torch.tensor([1 + 2j]))
    assert tensor_bytes("frequencies", model.get_buffer("frequencies"), torch.bfloat16) == 8


def test_the_dtype_of_the_model_is_kept(tmp_path: Path, net: Net) -> None:
    state = {name: tensor.half() for name, tensor in net.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "x.safetensors")
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "x.safetensors")
    assert model.body.weight.dtype == torch.float32


def change(net: Net, tmp_path: Path, suffix: str) -> Path:
    state = net.state_dict()
    del state["body.bias"], state["head.weight"]
    state["extra"] = torch.ones(1)
    path = tmp_path / f"x.{suffix}"
    if suffix == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["no map", "map"])
def test_one_error_names_all_that_does_not_fit(
    net: Net, tmp_path: Path, suffix: str, device_map: Any
) -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = (
        r"does not fit this Net: it lacks body\.bias; the model does not have extra\. Nothing was changed"
    )
    with pytest.raises(CheckpointError, match=expected):
        load_checkpoint_in_model(model, change(net, tmp_path, suffix), device_map, strict=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_without_strict_it_is_a_warning(net: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = empty()
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(model, change(net, tmp_path, "safetensors"))
    (message,) = caplog.messages
    assert "it lacks body.bias; the model does not have extra. The rest is loaded." in message
    assert torch.equal(model.body.weight, net.body.weight)
    assert model.body.bias.device.type == "meta"


@pytest.mark.parametrize("strict", [False, True])
def test_other_shapes_are_always_an_error(net: Net, tmp_path: Path, strict: bool) -> None:
    state = {**net.state_dict(), "body.weight": torch.ones(2, 2), "body.bias": torch.ones(3)}
    torch.save(state, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"body.weight is \(2, 2\) and not \(4, 4\), body.bias is"):
        load_checkpoint_in_model(Net(), tmp_path / "x.bin", strict=strict)


def test_broken_files_are_named(files: Path, tmp_path: Path) -> None:
    data = (files / "safe" / "model.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors cannot be read"):
        load_checkpoint_in_model(empty(), cut)
    index = files / "safe_shards" / "model.safetensors.index.json"
    (tmp_path / index.name).write_bytes(index.read_bytes())
    with pytest.raises(CheckpointError, match=r"names files that are not beside it: model-00001-of"):
        load_checkpoint_in_model(empty(), tmp_path)
    (tmp_path / index.name).write_text("{}")
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        load_checkpoint_in_model(empty(), tmp_path)
    (tmp_path / index.name).unlink()
    with pytest.raises(ConfigurationError, match="the folder holds none of model.safetensors"):
        load_checkpoint_in_model(empty(), tmp_path)
    with pytest.raises(ConfigurationError, match="there is no such file or folder"):
        load_checkpoint_in_model(empty(), tmp_path / "nowhere")


def test_a_malicious_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"body.weight": Exploding(tmp_path / "ran")}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="only tensors, numbers"):
        load_checkpoint_in_model(empty(), tmp_path / "x.bin")
    assert not (tmp_path / "ran").exists()


class Exploding:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.mark,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_map": {"embed": "cpu"}}, "no device to norm.weight"),
        ({"device_map": {"": "disk"}}, "Pass offload_folder"),
        ({"dtype": "float17"}, "dtype='float17'"),
    ],
)
def test_mistakes_are_named(files: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_checkpoint_in_model(empty(), files / "safe", **arguments)


def test_a_place_without_a_value(files: Path) -> None:
    model = empty()
    load_checkpoint_in_model(model, files / "safe", {"": "cpu", "body": "meta"}, dtype=torch.float16)
    assert (model.body.weight.device.type, model.body.weight.dtype) == ("meta", torch.float16)


def test_scales_of_eight_bit_weights_are_loaded_with_them(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2, 2).to(torch.int8), "SCB": torch.full((2,), 0.5), "bias": torch.ones(2)}
    save_file(state, tmp_path / "x.safetensors")

    class Int8Params(nn.Parameter):
        def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **scales: Any) -> Any:
            made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
            vars(made).update(scales)
            return made

    with torch.device("meta"):
        model = nn.Linear(2, 2).requires_grad_(False)
        model.weight = Int8Params(torch.empty(2, 2))
    load_checkpoint_in_model(model, tmp_path / "x.safetensors", {"": "cpu"}, strict=True)
    weight: Any = model.weight
    assert (weight.dtype, weight.SCB.tolist()) == (torch.int8, [0.5, 0.5])


def test_weights_are_quantized_to_eight_bits_before_they_are_offloaded(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Int8Params(nn.Parameter):
        pass

    model = empty()
    model.body.weight = Int8Params(model.body.weight)
    stored: list[str] = []

    def store(model: nn.Module, value: Any, name: str, *rest: Any) -> None:
        stored.append(name)

    monkeypatch.setattr("accelerate.big_modeling.load.quantize_and_offload_8bit", store)
    device_map = {"": "cpu", "body": "disk"}
    load_checkpoint_in_model(model, files / "safe", device_map, tmp_path, offload_8bit_bnb=True)
    assert stored == ["body.weight"]
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"body.bias"}


def test_the_index_of_the_disk_is_that_of_the_original_interface(files: Path, tmp_path: Path) -> None:
    device_map = {"": "cpu", "body": "disk"}
    load_checkpoint_in_model(empty(), files / "safe", device_map, tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "index.json").read_text())["body.bias"] == {
        "dtype": "bfloat16",
        "shape": [4],
    }
    assert (tmp_path / "body.bias.dat").stat().st_size == 8


class Counting(nn.Linear):
    """Keeps more in its state dict than tensors."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("size", ["10GB", 10], ids=["one file", "shards"])
def test_extra_state_of_modules_is_loaded(tmp_path: Path, size: Any) -> None:
    model = nn.Sequential(Counting(), nn.Linear(2, 2))
    model[0].calls = 7
    save_sharded(model.state_dict(), tmp_path, size, safe=False)
    again = nn.Sequential(Counting(), nn.Linear(2, 2))
    load_checkpoint_in_model(again, tmp_path, strict=True)
    assert again[0].calls == 7
    assert torch.equal(again[1].weight, model[1].weight)
    with pytest.raises(CheckpointError, match=r"the model does not have 0\._extra_state"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tmp_path, strict=True)
    with pytest.raises(ConfigurationError, match=r"0\._extra_state='dict': safetensors holds tensors only"):
        save_sharded(model.state_dict(), tmp_path)


def test_integers_are_no_dtype_of_parameters(files: Path) -> None:
    with pytest.raises(ConfigurationError, match="dtype=torch.int8: parameters are floating-point"):
        load_checkpoint_in_model(empty(), files / "safe", dtype=torch.int8)


def test_the_folder_is_made_before_anything_is_loaded(files: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = empty()
    with pytest.raises(CheckpointError, match="cannot be a folder for weights"):
        load_checkpoint_in_model(model, files / "safe", {"": "cpu", "body": "disk"}, tmp_path / "file")
    assert model.embed.weight.is_meta


@pytest.mark.parametrize("device_map", ["auto", {"": "dsik"}, {"": "xpu"}])
def test_places_are_checked_before_anything_is_loaded(files: Path, device_map: Any) -> None:
    model = empty()
    with pytest.raises(ConfigurationError, match="device"):
        load_checkpoint_in_model(model, files / "safe", device_map)
    assert model.embed.weight.is_meta


def wide(count: int = 12) -> nn.Module:
    """Blocks of 4 MiB in a list."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(count)))


@pytest.fixture(scope="module")
def wide_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wide")
    save_sharded(wide().state_dict(), root, 8 * MIB)
    return root


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="peaks are measured on Linux")
def test_no_more_than_the_model_and_one_file_is_in_memory(wide_files: Path) -> None:
    with torch.device("meta"):
        model = wide()
    meter, now = MemoryMeter(CPU), psutil.Process().memory_info
    before = now().rss
    meter.start()
    load_checkpoint_in_model(model, wide_files, {"": "cpu"}, dtype=torch.bfloat16)
    assert meter.peak() - before < (24 + 8 + 6) * MIB, "the model in bfloat16, a file, and what varies"


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="peaks are measured on Linux")
def test_no_more_than_two_blocks_of_those_on_the_disk_are_in_memory(wide_files: Path) -> None:
    with torch.device("meta"):
        model = wide()
    load_checkpoint_and_dispatch(model, wide_files, {"": "disk"})
    x = torch.ones(1, 1024)
    meter, now = MemoryMeter(CPU), psutil.Process().memory_info
    before = now().rss
    meter.start()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    assert meter.peak() - before < (3 * 4 + 6) * MIB, "of the 48 MiB of the model"
