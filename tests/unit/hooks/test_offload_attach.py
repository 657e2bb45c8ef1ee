from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    Prefetcher,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

X = torch.arange(3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) + x
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 3.0))
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x) * self.scale
        return out


def hooked(model: nn.Module) -> dict[str, bool]:
    """Modules with a hook, and whether it brings tensors by itself."""
    return {
        name: getattr(module._hf_hook, "block", None) is None
        for name, module in model.named_modules()
        if hasattr(module, "_hf_hook")
    }


RUN = dict.fromkeys(("", "embed", "layers.0", "layers.1", "layers.2", "head"), True)
MEMBERS = {f"layers.{index}.{name}": False for index in range(3) for name in "ab"}


def test_one_hook_for_each_block() -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    attach_align_device_hook(model, "cpu", offload=True)
    assert hooked(model) == {**RUN, **MEMBERS}
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(X), plain(X))
    assert all(parameter.is_meta for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert hooked(model) == {}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_without_offloading_modules_inside_a_block_have_no_hooks() -> None:
    model = Net()
    attach_align_device_hook(model, "cpu")
    assert hooked(model) == RUN
    other = Net()
    attach_execution_device_hook(other, "meta")
    assert hooked(other) == RUN
    assert all(parameter.is_meta for parameter in other.parameters())


def test_named_classes_are_blocks() -> None:
    model = nn.Sequential(nn.Sequential(Block()), Block())
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Sequential"])
    assert [name for name, runs in hooked(model).items() if runs] == [""]
    assert model._hf_hook.place_submodules


def test_hooks_inside_a_block_can_be_called_directly() -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    attach_align_device_hook(model, "cpu", offload=True, weights_map=model.state_dict())
    layer = model.layers[1].a
    hook = layer._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert hook.offload
    assert set(hook.original_devices) == {"weight", "bias"}
    assert dict(hook.weights_map.dataset)
    hook.pre_forward(layer)
    with torch.no_grad():
        layer.weight.mul_(2)
        plain.layers[1].a.weight.mul_(2)
    hook.weights_map = {name: tensor.to("cpu").clone() for name, tensor in layer.named_parameters()}
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.is_meta
    assert torch.equal(model(X), plain(X)), "the block reads what its inner hook has"


def test_a_module_inside_a_block_is_called_without_it() -> None:
    class Caller(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers[0].b(super().forward(x)[:, :4])
            return out

    model = Caller()
    plain = copy.deepcopy(model)
    attach_align_device_hook(model, "cpu", offload=True)
    for _ in range(2):
        assert torch.equal(model(X), plain(X))
        assert all(parameter.is_meta for parameter in model.parameters())
    model.layers[0].b(torch.ones(1, 4)).sum().backward()
    assert model.layers[0].b.weight.is_meta
    remove_hook_from_submodules(model)
    assert "forward" not in vars(model.layers[0].b)
    assert torch.equal(model(X), plain(X))


def test_a_hook_inside_a_running_block_does_not_offload_its_weights() -> None:
    class Caller(Block):
        def forward(self, x: Tensor) -> Tensor:
            hook = getattr(self.a, "_hf_hook", None)
            if hook is not None:
                hook.pre_forward(self.a)
                hook.post_forward(self.a, ())
            return super().forward(x)

    model = nn.ModuleList([Caller()])
    plain = copy.deepcopy(model)
    attach_align_device_hook(model, "cpu", offload=True)
    assert torch.equal(model[0](torch.ones(1, 4)), plain[0](torch.ones(1, 4)))


def test_one_module_inside_a_block_loses_its_hook() -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    attach_align_device_hook(model, "cpu", offload=True)
    remove_hook_from_module(model.layers[0].a)
    assert not model.layers[0].a.weight.is_meta
    assert model.layers[0].b.weight.is_meta
    assert torch.equal(model(X), plain(X))
    assert not model.layers[0].a.weight.is_meta


def test_one_device_for_all() -> None:
    model = Net()
    attach_align_device_hook_on_blocks(model, "meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model._hf_hook.io_same_device
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    attach_align_device_hook_on_blocks(model, "cpu", offload=True, weights_map=model.state_dict())
    assert isinstance(model._hf_hook, SequentialHook), "for inputs, and for its own tensors"
    assert torch.equal(model(X), plain(X))


def test_a_map_decides_tensor_by_tensor() -> None:
    model = Net()
    devices = {"": "cpu", "layers": "meta", "layers.1.b": "cpu", "head": "cpu"}
    attach_align_device_hook_on_blocks(model, devices, {"head": True}, model.state_dict())
    meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert meta == {
        "head.weight",
        "head.bias",
        *(
            f"layers.{i}.{n}.{k}"
            for i in range(3)
            for n in "ab"
            for k in ("weight", "bias")
            if (i, n) != (1, "b")
        ),
    }
    assert not model.layers[0]._hf_hook.offload
    assert model.head._hf_hook.offload
    assert not hasattr(model.layers[1], "_hf_hook"), "its parts are on different devices"
    assert model.layers[1].b._hf_hook.execution_device == "cpu"
    assert model.layers[1].a._hf_hook.execution_device == "meta"


def test_a_hook_is_appended_to_a_module_inside_a_block() -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    attach_align_device_hook_on_blocks(model, "cpu", offload=True)
    inner = model.layers[0].a
    add_hook_to_module(inner, ModelHook(), append=True)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
        values = torch.ones(1, inner.in_features)
        assert torch.equal(inner(values), plain.layers[0].a(values))
    assert inner.weight.is_meta
    remove_hook_from_submodules(model)
    assert torch.equal(inner.weight, plain.layers[0].a.weight)


def test_weights_in_files_are_prefetched(tmp_path: Path) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    offload_state_dict(tmp_path, model.state_dict())
    before = set(threading.enumerate())
    attach_align_device_hook_on_blocks(
        model, "cpu", offload=True, weights_map=OffloadedWeightsLoader(save_folder=tmp_path)
    )
    prefetchers = {id(model.layers[index]._hf_hook.prefetcher) for index in range(3)}
    assert len(prefetchers) == 1
    assert isinstance(model.head._hf_hook.prefetcher, Prefetcher)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(X), plain(X))
    assert len(set(threading.enumerate()) - before) == 1
    remove_hook_from_submodules(model)
    assert model.head.weight.shape == plain.head.weight.shape


def test_weights_in_memory_need_no_thread() -> None:
    model = Net()
    attach_align_device_hook_on_blocks(
        model, "cpu", offload=True, weights_map=OffloadedWeightsLoader(model.state_dict())
    )
    assert model.head._hf_hook.prefetcher is None
    model = Net()
    attach_align_device_hook(model, "meta", offload=True, weights_map=model.state_dict())
    assert isinstance(model.head._hf_hook.prefetcher, Prefetcher)
    model(X)
    model(X)
    assert all(parameter.is_meta for parameter in model.parameters())
    remove_hook_from_submodules(model)


@pytest.mark.parametrize("name", ["", "part"])
def test_names_of_a_part(name: str) -> None:
    model, plain = Block(), Block()
    plain.load_state_dict(model.state_dict())
    weights = {f"{name}.{key}".strip("."): value for key, value in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights, module_name=name)
    assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
