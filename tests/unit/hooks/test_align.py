"""Inputs and weights are on one device; the meta device replaces the accelerator."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelerate.hooks
from accelerate.hooks import (
    AlignDevicesHook,
    Slot,
    add_hook_to_module,
    all_on_device,
    find_slots,
    remove_hook_from_module,
)

CPU, META = torch.device("cpu"), torch.device("meta")
X = torch.randn(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.a(x))
        return out


def places(module: nn.Module) -> dict[str, str]:
    return {
        name: tensor.device.type for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def test_constructor_arguments_have_attributes_of_their_names() -> None:
    names = list(inspect.signature(AlignDevicesHook).parameters)
    hook = AlignDevicesHook(*names)  # type: ignore[arg-type]
    assert [getattr(hook, name) for name in names] == names
    assert accelerate.hooks.AlignDevicesHook is AlignDevicesHook
    assert not hasattr(AlignDevicesHook(offload=True), "original_devices")
    assert "offload=True" in repr(AlignDevicesHook(offload=True))


def test_tensors_are_placed_and_inputs_follow() -> None:
    model = Net()
    add_hook_to_module(model, AlignDevicesHook("meta", place_submodules=True))
    assert set(places(model).values()) == {"meta"}
    assert model(X).device == META
    own = nn.Linear(4, 4)
    own.inner = nn.Linear(4, 4)
    add_hook_to_module(own, AlignDevicesHook("meta"))
    assert places(own) == {"weight": "meta", "bias": "meta", "inner.weight": "cpu", "inner.bias": "cpu"}


def test_outputs_are_moved_to_the_device_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = AlignDevicesHook(io_same_device=True)
    model = add_hook_to_module(nn.Identity(), hook)
    assert model({"x": [X]})["x"][0] is X
    assert hook.input_device == CPU
    hook.io_same_device = False
    hook.input_device = META
    assert hook.post_forward(model, X) is X
    hook.io_same_device = True
    assert hook.post_forward(model, X).device == META


def test_inputs_in_skip_keys_are_not_moved() -> None:
    hook = AlignDevicesHook("meta", skip_keys=["cache"])
    args, kwargs = hook.pre_forward(nn.Identity(), X, [X], cache=X, other=X, number=7)
    assert args[0].device == args[1][0].device == kwargs["other"].device == META
    assert kwargs["cache"] is X
    assert kwargs["number"] == 7


def test_inputs_on_the_device_are_returned_unchanged() -> None:
    args, kwargs = (X, 1, None, "x"), {"y": X}
    assert all_on_device(args, kwargs, CPU)
    assert not all_on_device(args, kwargs, META)
    assert not all_on_device(((X,),), {}, CPU)
    found = AlignDevicesHook("cpu").pre_forward(nn.Identity(), *args, **kwargs)
    assert found[0] == args
    assert found[1] == kwargs


@pytest.mark.parametrize("buffers", [False, True])
def test_weights_are_loaded_for_the_forward(buffers: bool) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    hook = AlignDevicesHook("cpu", offload=True, offload_buffers=buffers, place_submodules=True)
    add_hook_to_module(model, hook)
    kinds = {
        name: "meta" if buffers or "running" not in name and "num" not in name else "cpu"
        for name in places(model)
    }
    assert places(model) == kinds
    assert hook.original_devices == dict.fromkeys(plain.state_dict(), CPU)
    assert torch.equal(model(X), plain(X))
    assert places(model) == kinds
    assert torch.equal(model.eval()(X), plain.eval()(X))
    remove_hook_from_module(model)
    assert set(places(model).values()) == {"cpu"}
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_statistics_that_a_forward_changes_are_kept() -> None:
    model = Net().train()
    add_hook_to_module(
        model, AlignDevicesHook("cpu", offload=True, offload_buffers=True, place_submodules=True)
    )
    model(X)
    model(X)
    remove_hook_from_module(model)
    assert model.norm.num_batches_tracked == 2


def test_only_direct_tensors_of_the_module_are_offloaded() -> None:
    model = Net()
    model.scale = nn.Parameter(torch.ones(1))
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True))
    assert {name for name, kind in places(model).items() if kind == "meta"} == {"scale"}


def test_an_assigned_weights_map_is_used_when_hooks_are_called_directly() -> None:
    layer = nn.Linear(4, 4)
    add_hook_to_module(layer, hook := AlignDevicesHook("cpu", offload=True))
    hook.pre_forward(layer)
    assert layer.weight.device == CPU
    with torch.no_grad():
        layer.weight.fill_(2)
    hook.weights_map = {name: tensor.to("cpu") for name, tensor in layer.named_parameters()}
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.is_meta
    hook.weights_map = {"weight": torch.full((4, 4), 3.0), "bias": torch.zeros(4)}
    assert torch.equal(layer(torch.ones(1, 4)), torch.full((1, 4), 12.0))


def test_weights_on_the_disk_stay_offloaded_when_the_hook_is_removed() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    weights = {"weight": torch.eye(4), "bias": torch.zeros(4)}
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert layer._hf_hook.original_devices == {"weight": META, "bias": META}
    assert torch.equal(layer(X), X)
    remove_hook_from_module(layer)
    assert layer.weight.is_meta


def test_hooks_can_be_built_from_other_hooks() -> None:
    def again(old: Any) -> Any:
        kind = getattr(accelerate.hooks, type(old).__name__)
        names = inspect.signature(kind.__init__).parameters
        return kind(**{name: value for name, value in vars(old).items() if name in names})

    old = nn.Linear(4, 4)
    add_hook_to_module(old, AlignDevicesHook("cpu", offload=True))
    new = nn.Linear(4, 4)
    add_hook_to_module(new, again(old._hf_hook))
    assert torch.equal(new(X), old(X))


def test_gradients_reach_inputs_through_offloaded_weights() -> None:
    layer = nn.Linear(4, 4)
    weight = layer.weight.detach().clone()
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    x = X.clone().requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(x.grad, weight.sum(0).expand(3, 4))


def test_copied_models_have_their_own_weights_map() -> None:
    model = Net().eval()
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X), model(X))
    assert places(copied) == places(model)
    assert copied._hf_hook.weights_map["a.weight"] is not model._hf_hook.weights_map["a.weight"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_blocks() -> None:
    model = Net().eval()
    plain = copy.deepcopy(model)
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    model.compile(backend="eager")
    with torch.no_grad():
        for x in (X, X + 1):
            assert torch.equal(model(x), plain(x))
    assert model.a.weight.is_meta
    torch.compiler.reset()


def make() -> tuple[nn.Linear, Slot, SimpleNamespace]:
    module = nn.Linear(2, 2, bias=False)
    source = SimpleNamespace(weights_map={"weight": torch.ones(2, 2)})
    (slot,), _ = find_slots(module, source, with_buffers=False, with_inner=False)
    slot.empty = nn.Parameter(torch.empty(2, 2, device="meta"))
    slot.clear()
    return module, slot, source


def test_values_that_stay_in_memory_are_wrapped_once() -> None:
    module, slot, source = make()
    slot.load(CPU)
    first = module.weight
    slot.clear()
    slot.load(CPU)
    assert module.weight is first
    slot.clear()
    source.weights_map["weight"].data = torch.full((2, 2), 2.0)
    slot.load(CPU)
    assert torch.equal(module.weight, torch.full((2, 2), 2.0))
    slot.clear()
    source.weights_map["weight"] = torch.zeros(2, 2)
    slot.load(CPU)
    assert torch.equal(module.weight, torch.zeros(2, 2))
    slot.clear()
    slot.fill(slot.read(CPU), CPU)
    slot.clear()
    assert slot.filled is None


def test_changes_to_the_empty_tensor_count() -> None:
    module, slot, _ = make()
    slot.load(CPU)
    slot.clear()
    module.requires_grad_(False)
    slot.load(CPU)
    assert not module.weight.requires_grad
    slot.clear()
    module.half()
    slot.load(CPU)
    assert module.weight.dtype == torch.float16
    slot.clear()
    module.weight = nn.Parameter(torch.empty(2, 2, device="meta", dtype=torch.float64))
    slot.load(CPU)
    assert module.weight.dtype == torch.float64


def test_integers_keep_their_dtype() -> None:
    module = nn.BatchNorm1d(2)
    source = SimpleNamespace(weights_map={"num_batches_tracked": torch.tensor(7, dtype=torch.int32)})
    slots, stay = find_slots(module, source, with_buffers=True, with_inner=False)
    slot = next(slot for slot in slots if slot.key == "num_batches_tracked")
    assert slot.read(CPU).dtype == torch.int32
    assert not stay


def test_tied_tensors_share_a_slot_and_others_stay() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight
    module[2].register_buffer("steps", torch.zeros(1), persistent=False)
    slots, stay = find_slots(module, None, with_buffers=True, with_inner=True)
    assert [slot.name for slot in slots][:3] == ["0.weight", "0.bias", "1.bias"]
    assert list(stay) == ["2.steps"]
    assert [(tensors is module[1]._parameters, key) for tensors, key in slots[0].tied] == [(True, "weight")]
    slots[0].empty = nn.Parameter(torch.empty(2, 2, device="meta"))
    slots[0].clear()
    assert module[1].weight is module[0].weight is slots[0].empty
    slots[0].fill(torch.ones(2, 2), CPU)
    assert module[1].weight is module[0].weight
    _, stay = find_slots(module, None, with_buffers=False, with_inner=True)
    assert set(stay) == {"2.running_mean", "2.running_var", "2.num_batches_tracked", "2.steps"}
    assert len(find_slots(module, None, False, with_inner=False)[0]) == 0


def test_parameters_keep_their_attributes() -> None:
    module, slot, _ = make()
    slot.empty.note = 7  # type: ignore[attr-defined]
    slot.fill(slot.read(CPU), CPU)
    assert module.weight.note == 7  # type: ignore[attr-defined]
