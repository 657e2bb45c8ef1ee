"""Models with a device map have the same outputs; the meta device replaces the accelerator."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import accelerate.big_modeling
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.base import ConfigurationError, PreparationError, StateError
from accelerate.big_modeling import guard_moves, move_whole, remove_old_hooks
from accelerate.checkpointing import save_sharded
from accelerate.devices import BACKENDS
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    get_state_dict_offloaded_model,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


def test_a_model_on_its_device_is_not_moved() -> None:
    model = nn.Linear(2, 2)
    model.to = None  # type: ignore[assignment]
    move_whole(model, "cpu")
    with pytest.raises(ConfigurationError, match="weight, bias have no values"):
        move_whole(nn.Linear(2, 2, device="meta"), "cpu")
    other = nn.Linear(2, 2)
    move_whole(other, "meta")
    assert other.weight.is_meta


def test_moves_are_guarded_while_there_are_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    add_hook_to_module(model, AlignDevicesHook("cpu"))
    guard_moves(model)
    with caplog.at_level(logging.WARNING):
        assert model.to(torch.float64) is model
        assert model.to(dtype=torch.float64) is model
        assert not caplog.messages
        assert model.to("cpu", torch.float32) is model
        assert model.to(device="cpu") is model
    assert model.weight.dtype == torch.float32
    assert len(caplog.messages) == 2
    words = "You shouldn't move a model that is dispatched using accelerate hooks. Linear.to() does"
    assert all(message.startswith(words) for message in caplog.messages)
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True), append=True)
    with pytest.raises(RuntimeError, match="offloaded"):
        model.to("cpu")
    remove_old_hooks(model)
    caplog.clear()
    assert model.to("cpu") is model
    assert not caplog.text


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS])
def test_added_move_methods_of_modules_are_guarded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, name, lambda self: self, raising=False)
    model = nn.Linear(2, 2)
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True))
    guard_moves(model)
    with pytest.raises(StateError, match=rf"offloaded to cpu or disk, as Linear.{name}\(\) does"):
        getattr(model, name)()


def test_a_submodule_that_is_called_like_a_device_is_no_move() -> None:
    model = nn.Module()
    model.neuron = nn.Linear(2, 2)
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True))
    guard_moves(model)
    assert isinstance(model.neuron, nn.Linear)


def test_hooks_of_others_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    add_hook_to_module(model[0], ModelHook())
    add_hook_to_module(model[1], AlignDevicesHook("cpu"))
    remove_old_hooks(model)
    assert hasattr(model[0], "_hf_hook")
    assert not hasattr(model[1], "_hf_hook")


X = torch.arange(4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.a(x)) + self.shift
        return out


class Net(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x) * self.scale
        return out


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def plain(net: Net) -> Net:
    return copy.deepcopy(net)


def meta_names(model: nn.Module) -> set[str]:
    return {name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta}


def check(model: nn.Module, plain: nn.Module, times: int = 3) -> None:
    with torch.no_grad():
        for _ in range(times):
            assert torch.equal(model(X), plain(X))


# One device


def test_a_device_map_to_the_cpu_adds_no_hooks(net: Net, plain: Net) -> None:
    assert dispatch_model(net, {"": "cpu"}) is net
    assert net.hf_device_map == {"": "cpu"}
    assert not any(hasattr(module, "_hf_hook") for module in net.modules())
    assert "forward" not in vars(net)
    check(net, plain)


def test_one_device_with_hooks(net: Net, plain: Net) -> None:
    dispatch_model(net, {"": "cpu"}, force_hooks=True)
    assert {"_hf_hook", "_old_forward", "forward", "to", "cuda"} <= vars(net).keys()
    assert net._hf_hook.io_same_device
    check(net, plain)
    assert net.to("cpu") is net


def test_a_model_without_values_cannot_be_moved() -> None:
    with init_empty_weights():
        empty = Net()
    with pytest.raises(ConfigurationError, match="have no values to move to cpu"):
        dispatch_model(empty, {"": "cpu"})


# Several places


def test_a_dispatched_model_runs_after_its_files_were_deleted(tmp_path: Path) -> None:
    """Transformers deletes the files of a folder before it saves a model that reads from them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path, x = tmp_path / "model.safetensors", torch.ones(1, 2)
    save_file(model.state_dict(), path)
    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    load_checkpoint_and_dispatch(empty, path, {"": "disk"})
    path.unlink()
    assert torch.allclose(empty(x), model(x))


MIXED = {"embed": "cpu", "layers": "disk", "head": "cpu", "scale": "cpu"}


@pytest.mark.parametrize(
    "device_map",
    [
        MIXED,
        {"": "disk"},
        {"": "cpu", "layers.1": "disk"},
        {"": "disk", "layers": "cpu", "layers.2.a": "disk"},
        {"": "cpu", "scale": "disk"},
        {"": "cpu", "layers.0.a.weight": "disk"},
    ],
    ids=str,
)
@pytest.mark.parametrize("buffers", [False, True])
def test_modules_are_offloaded_to_the_disk(
    net: Net, plain: Net, tmp_path: Path, device_map: dict[str, Any], buffers: bool
) -> None:
    dispatch_model(net, device_map, offload_dir=tmp_path, offload_buffers=buffers)
    assert net.hf_device_map == device_map
    away = meta_names(net)
    assert away
    assert buffers or not any("running" in name for name in away)
    check(net, plain)
    assert meta_names(net) == away
    state = get_state_dict_offloaded_model(net)
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    remove_hook_from_submodules(net)
    assert not meta_names(net)
    check(net, plain, 1)


def test_accelerators_compute_for_the_cpu(net: Net) -> None:
    dispatch_model(net, {"": "meta", "layers.1": "cpu", "layers.2": "cpu"})
    hooks = {name: module._hf_hook for name, module in net.named_modules() if hasattr(module, "_hf_hook")}
    assert not hooks["layers.0"].offload
    assert hooks["layers.1"].offload
    assert str(hooks["layers.1"].execution_device) == "meta"
    assert hooks["layers.1"].weights_map["a.weight"].device.type == "cpu"
    net._hf_hook.io_same_device = False  # outputs cannot be moved back from the meta device
    for _ in range(3):
        assert net(X).is_meta
    assert hooks["layers.2"].prefetcher is hooks["layers.1"].prefetcher
    del hooks
    remove_hook_from_submodules(net)


def test_the_main_device_can_be_chosen(net: Net, plain: Net) -> None:
    dispatch_model(net, {"": "cpu", "layers": "cpu", "head": "cpu"}, main_device="cpu", force_hooks=True)
    assert not meta_names(net)
    check(net, plain)


def test_weights_from_a_state_dict(plain: Net) -> None:
    with init_empty_weights():
        empty = Net().eval()
    for name, buffer in plain.named_buffers():
        empty.get_buffer(name).copy_(buffer)
    assert cpu_offload(empty, "cpu", state_dict=plain.state_dict()) is empty
    check(empty, plain)


def test_an_index_of_safetensors(plain: Net, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in plain.state_dict().items() if name != "head.weight"}
    save_sharded(state, tmp_path)
    file = str(tmp_path / "model.safetensors")
    index = {name: {"safetensors_file": file, "weight_name": name, "dtype": "float32"} for name in state}
    net = copy.deepcopy(plain)
    for name, _ in list(net.named_parameters(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        net.get_submodule(owner)._parameters[key] = nn.Parameter(plain.get_parameter(name).to("meta"))
    net.head.weight = net.embed.weight
    dispatch_model(net, {"": "disk"}, offload_index=index)
    assert net.layers[0]._hf_hook.weights_map.dataset.index["layers.0.a.bias"]["safetensors_file"] == file
    assert len(list(tmp_path.iterdir())) == 1, "nothing is written"
    check(net, plain)
    del index["layers.1.a.bias"]
    with pytest.raises(ConfigurationError, match=r"layers\.1\.a\.bias have no values"):
        dispatch_model(net, {"": "disk"}, offload_index=index)
    remove_hook_from_submodules(net)


def test_a_second_device_map_replaces_the_first(net: Net, plain: Net, tmp_path: Path) -> None:
    dispatch_model(net, MIXED, offload_dir=tmp_path)
    check(net, plain)
    dispatch_model(net, {"": "cpu", "head": "disk", "embed": "disk"}, offload_dir=tmp_path)
    assert meta_names(net) == {"embed.weight"}
    check(net, plain)
    dispatch_model(net, {"": "cpu"})
    assert not any(hasattr(module, "_hf_hook") for module in net.modules())
    check(net, plain)


def test_offloading_does_not_reuse_files_of_another_model(net: Net, plain: Net, tmp_path: Path) -> None:
    other = Net()
    disk_offload(other, tmp_path)
    remove_hook_from_submodules(other)
    disk_offload(net, tmp_path)
    check(net, plain)
    remove_hook_from_submodules(net)


def test_moving_is_refused(net: Net, tmp_path: Path) -> None:
    dispatch_model(net, MIXED, offload_dir=tmp_path)
    for name in ("to", "cuda"):
        with pytest.raises(RuntimeError, match=rf"You can't move a model .* offloaded .*Net\.{name}\(\)"):
            getattr(net, name)("cpu")
    remove_hook_from_submodules(net)
    assert net.to("cpu") is net


def test_offloading_to_the_disk_is_logged(net: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    everything = {"": "cpu"}
    dispatch_model(net, everything, force_hooks=True)
    assert not caplog.messages
    dispatch_model(net, MIXED, offload_dir=tmp_path)
    (message,) = caplog.messages
    assert message == "Some parameters are on the meta device because they were offloaded to the disk."


def test_an_unknown_name_has_no_effect(net: Net, plain: Net, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="do not match any submodules"):
        dispatch_model(net, {**MIXED, "tail": "disk"}, offload_dir=tmp_path)
    assert torch.equal(net(X), plain(X))


def test_there_must_be_a_folder(net: Net, plain: Net) -> None:
    with pytest.raises(ConfigurationError, match=r"puts layers on the disk.*Pass offload_dir"):
        dispatch_model(net, MIXED)
    check(net, plain, 1)


def test_the_map_is_checked_first_and_clients_may_turn_that_off(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="no device to scale"):
        dispatch_model(net, {"embed": "cpu", "layers": "cpu", "head": "cpu"}, force_hooks=True)
    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", lambda *args, **kwargs: None)
    dispatch_model(net, {"embed": "cpu", "layers": "cpu", "head": "cpu"}, force_hooks=True)
    assert net(X).shape == (4, 5)


# Everything offloaded


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_all_weights_are_offloaded_to_the_cpu_or_the_disk(
    net: Net, plain: Net, tmp_path: Path, where: str, buffers: bool
) -> None:
    if where == "disk":
        assert disk_offload(net, tmp_path, offload_buffers=buffers) is net
    else:
        assert cpu_offload(net, offload_buffers=buffers) is net
    assert isinstance(net._hf_hook, SequentialHook)
    assert isinstance(net._hf_hook.hooks[0], AlignDevicesHook)
    assert {name for name, _ in plain.named_parameters()} <= meta_names(net)
    check(net, plain)
    remove_hook_from_submodules(net)
    check(net, plain, 1)


def test_an_offloaded_model_is_offloaded_again(net: Net, plain: Net, tmp_path: Path) -> None:
    for _ in range(2):
        check(cpu_offload(net), plain)
    check(disk_offload(net, tmp_path), plain)
    remove_hook_from_submodules(net)
    check(net, plain, 1)


def test_tied_weights_are_kept_once(net: Net) -> None:
    cpu_offload(net)
    weights = net.head._hf_hook.weights_map.dataset
    assert weights["head.weight"] is weights["embed.weight"]


def test_several_offloaded_models_run_in_turn(net: Net, plain: Net, tmp_path: Path) -> None:
    other, other_plain = Net().eval(), Net().eval()
    other_plain.load_state_dict(other.state_dict())
    disk_offload(net, tmp_path / "one")
    disk_offload(other, tmp_path / "two")
    before = threading.active_count()
    for _ in range(3):
        check(net, plain, 1)
        check(other, other_plain, 1)
    assert threading.active_count() <= before + 2
    for model in (net, other):
        remove_hook_from_submodules(model)


# From files


@pytest.fixture
def files(plain: Net, tmp_path: Path) -> Path:
    save_sharded(plain.state_dict(), tmp_path / "safe", 300)
    save_sharded(plain.state_dict(), tmp_path / "torch", 300, safe=False)
    return tmp_path


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["safe", "torch"])
@pytest.mark.parametrize(
    "device_map", ["auto", "sequential", {"": "cpu", "layers": "disk"}, {"": "disk"}, None]
)
def test_loading_places_weights_on_the_devices_of_the_map(
    files: Path, plain: Net, kind: str, device_map: Any, tmp_path: Path
) -> None:
    needs_folder = kind == "torch" and isinstance(device_map, dict)
    folder = tmp_path / "offload" if needs_folder else None
    model = load_checkpoint_and_dispatch(
        empty(), files / kind, device_map, offload_folder=folder, strict=True
    )
    check(model, plain)
    if isinstance(device_map, dict):
        assert meta_names(model)
        index = model.layers[0]._hf_hook.weights_map.dataset.index
        assert all(("safetensors_file" in entry) == (kind == "safe") for entry in index.values())
    remove_hook_from_submodules(model)


def test_weights_for_the_disk_need_a_folder_unless_they_can_be_mapped(files: Path) -> None:
    with pytest.raises(ConfigurationError, match="Pass offload_folder"):
        load_checkpoint_and_dispatch(empty(), files / "torch", {"": "disk"})


@pytest.mark.parametrize("kind", ["safe", "torch"])
def test_another_format(files: Path, plain: Net, kind: str, tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(
        empty(), files / kind, {"": "disk"}, offload_folder=tmp_path / "offload", dtype=torch.float64
    )
    assert torch.allclose(model(X), plain.double()(X))
    remove_hook_from_submodules(model)


def test_a_small_budget(files: Path, plain: Net) -> None:
    model = load_checkpoint_and_dispatch(empty(), files / "safe", "auto", {"cpu": 550}, ["Block"])
    assert {"cpu", "disk"} == set(model.hf_device_map.values())
    check(model, plain)
    remove_hook_from_submodules(model)


def test_an_unknown_device_map_is_refused(files: Path) -> None:
    with pytest.raises(ConfigurationError, match="device_map='best'"):
        load_checkpoint_and_dispatch(empty(), files / "safe", "best")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.middle(self.embedding(tokens)))
        return logits


def dispatch_all(model: nn.Module, folder: Path) -> nn.Module:
    device_map = {"embedding": "disk", "middle": "cpu", "head": "disk"}
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=folder)


def test_removing_hooks_ties_weights_again(tmp_path: Path) -> None:
    tokens = torch.tensor([1, 2])
    offloads: dict[str, Callable[[nn.Module], nn.Module]] = {
        "cpu_offload": lambda model: cpu_offload(model, "cpu"),
        "disk_offload": lambda model: disk_offload(model, tmp_path / "disk", "cpu"),
        "dispatch_model": lambda model: dispatch_all(model, tmp_path / "map"),
    }
    removals: dict[str, Callable[[Any], object]] = {
        "at once": remove_hook_from_submodules,
        "recursively": lambda model: remove_hook_from_module(model, recurse=True),
        "head first": lambda model: [remove_hook_from_submodules(part) for part in (model.head, model)],
        "of a copy": lambda model: remove_hook_from_submodules(model),
        "after another hook was added": remove_after_another_hook,
    }
    untied = []
    for (name, offload), (way, remove) in itertools.product(offloads.items(), removals.items()):
        model = Tied()
        expected = model(tokens)
        for _ in range(2):  # twice, because the tensors of the second time are others
            offload(model)
            assert torch.equal(model(tokens), expected)
            if way == "of a copy":
                model = copy.deepcopy(model)
            remove(model)
            assert torch.equal(model(tokens), expected)
            if model.head.weight is not model.embedding.weight or vars(model.head.weight):
                untied.append((name, way))
    assert not untied


def remove_after_another_hook(model: Tied) -> None:
    add_hook_to_module(model.head, ModelHook(), append=True)
    remove_hook_from_submodules(model)


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = nn.Module()
        self.inner.layer = nn.Linear(2, 2)
        self.inner.register_buffer("steps", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    "offload",
    [
        lambda model, path: load_checkpoint_and_dispatch(
            model, path, {"": "disk"}, offload_folder=path / "a"
        ),
        lambda model, path: load_checkpoint_and_dispatch(
            model, path, {"first": "disk", "inner": "cpu"}, offload_folder=path / "b", offload_buffers=True
        ),
        lambda model, path: cpu_offload(model, "cpu", state_dict=WithBuffer().state_dict()),
        lambda model, path: disk_offload(
            load_checkpoint_and_dispatch(model, path), path / "d", "cpu", offload_buffers=True
        ),
    ],
    ids=["disk", "disk and cpu", "cpu_offload", "disk_offload"],
)
def test_a_buffer_without_values_is_named_before_the_forward(offload: Any, tmp_path: Path) -> None:
    save_file(WithBuffer().state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights(include_buffers=True):
        model = WithBuffer()
    with pytest.raises(ConfigurationError, match=r"inner\.steps have no values.*include_buffers=False"):
        offload(model, tmp_path)


def test_a_device_map_with_a_value_that_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"device_map\[''\]=\['cpu'\]: it is not a device") as raised:
        dispatch_model(nn.Linear(2, 2), {"": ["cpu"]})
    assert isinstance(raised.value, TypeError)


@pytest.mark.usefixtures("states")
def test_an_offloaded_model_is_prepared_for_inference_and_an_optimizer_of_its_weights_is_refused(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = model(torch.ones(1, 2))
    disk_offload(model, tmp_path, execution_device="cpu")
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PreparationError, match="4 trainable parameters of SGD are offloaded"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert torch.equal(accelerator.prepare(model)(torch.ones(1, 2)), expected)
