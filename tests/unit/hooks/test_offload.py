"""Models that wait on the CPU between their forwards, and modules whose tensors are offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, cpu_offload_with_hook, disk_offload, load_checkpoint_in_model
from accelerate.base import ConfigurationError
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    is_any_offloaded,
    remove_hook_from_submodules,
)

X = torch.ones(1, 2)


class Recorded(nn.Linear):
    """A layer that notes where it is sent; there is one device here."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.sent: list[str] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.sent.append(str(args[0]))
        return self


def test_a_model_is_moved_to_the_device_and_the_previous_one_is_offloaded() -> None:
    first, second = Recorded(), Recorded()
    _, one = cpu_offload_with_hook(first, "meta")
    _, two = cpu_offload_with_hook(second, "meta", one)
    assert (first.sent, second.sent) == (["cpu"], ["cpu"])
    (args, kwargs) = two.hook.pre_forward(second, X, x=X)
    assert args[0].is_meta
    assert kwargs["x"].is_meta
    assert (first.sent, second.sent) == (["cpu", "cpu"], ["cpu", "meta"])
    two.offload()
    assert second.sent[-1] == "cpu"
    two.remove()
    assert not hasattr(second, "_hf_hook")


def test_a_model_on_the_device_does_not_offload_others() -> None:
    first, second = Recorded(), Recorded()
    _, one = cpu_offload_with_hook(first, "cpu")
    _, two = cpu_offload_with_hook(second, "cpu", one)
    second(X)
    assert first.sent == ["cpu"]
    assert isinstance(two, UserCpuOffloadHook)
    assert vars(two) == {"model": second, "hook": second._hf_hook}


@pytest.mark.cpu_only
def test_the_default_device_is_that_of_the_process() -> None:
    hook = CpuOffload()
    assert hook.execution_device == torch.device("cpu")
    assert hook.prev_module_hook is None
    layer = add_hook_to_module(nn.Linear(2, 2), hook)
    assert layer(X).shape == (1, 2)


def build() -> nn.Module:
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8)]), "head": nn.Linear(4, 4)}
    )
    model["tied"] = nn.Linear(4, 4, bias=False)
    model["tied"].weight = model["head"].weight
    return model


def test_has_offloaded_params_is_true_for_offloading_hooks() -> None:
    layer = nn.Linear(2, 2)
    assert not has_offloaded_params(layer)
    add_hook_to_module(layer, AlignDevicesHook("cpu"))
    assert not has_offloaded_params(layer)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    assert has_offloaded_params(layer)


def test_an_offloaded_module_is_on_its_device_within_the_context() -> None:
    model = build()
    attach_align_device_hook(model, "cpu", offload=True)
    inner = model["layers"][0].linear1
    for layer in (model["head"], inner):
        before = layer._hf_hook.execution_device
        with align_module_device(layer):
            assert layer.weight.device.type == "cpu"
        assert layer.weight.is_meta
        with align_module_device(layer, "meta"):
            assert layer._hf_hook.execution_device == "meta"
        assert layer._hf_hook.execution_device == before
    with pytest.raises(ZeroDivisionError), align_module_device(model["head"]):
        _ = 1 / 0
    assert model["head"].weight.is_meta


def test_a_change_of_data_within_the_context_stays(tmp_path: Path) -> None:
    model = disk_offload(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), tmp_path)
    with torch.no_grad(), align_module_device(model[0]):
        model[0].weight.data.zero_()
        model[0].bias.data.fill_(1.0)
    with align_module_device(model[1]):
        expected = model[1](torch.ones(2)).tolist()
    assert model(torch.ones(2)).tolist() == expected
    assert model[1].weight.is_meta


def test_a_module_without_hooks_is_moved_within_the_context() -> None:
    layer = nn.Linear(2, 2)
    with align_module_device(layer):
        assert layer.weight.device.type == "cpu"
    layer.inner = nn.Linear(2, 2)
    weight = layer.inner.weight
    with align_module_device(layer, "cpu"):
        assert layer.inner.weight is weight


def test_the_state_dict_of_all() -> None:
    model = build()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True)
    found = get_state_dict_offloaded_model(model)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    plain = nn.Linear(2, 2)
    assert list(get_state_dict_offloaded_model(plain)) == ["weight", "bias"]
    with pytest.raises(ConfigurationError, match="weight, bias have no values"):
        get_state_dict_offloaded_model(nn.Linear(2, 2, device="meta"))


def test_the_part_of_one_module() -> None:
    model = build()
    expected = model["head"].bias.detach().clone()
    attach_align_device_hook(model, "cpu", offload=True)
    state = {"head.weight": "", "other": 1}
    found = get_state_dict_from_offload(model["head"], "head.weight", state)
    assert found is state
    assert state["other"] == 1
    assert not state["head.weight"].is_meta
    state["head.bias"] = ""
    assert torch.equal(get_state_dict_from_offload(model["head"], "head.bias", state)["head.bias"], expected)


@pytest.mark.usefixtures("states")
def test_an_accelerator_saves_what_is_offloaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = build()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disk_offload(model, tmp_path / "weights")
    assert is_any_offloaded(model)
    assert not is_any_offloaded(nn.Linear(2, 2))
    found = accelerator.get_state_dict(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    accelerator.save_model(model, tmp_path / "saved")
    again = build()
    load_checkpoint_in_model(again, tmp_path / "saved", strict=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    remove_hook_from_submodules(model)


def test_a_module_moved_to_meta_is_restored_with_its_values() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.tolist()
    with align_module_device(module, "meta"):
        assert module.weight.is_meta
    assert module.weight.tolist() == before
