"""One tensor on one device: what is replaced, what it keeps, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.weights import (
    check_device_same,
    id_tensor_storage,
    mapped_device,
    read_dtype,
    set_module_tensor_to_device,
)


def build(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_a_value_is_set_without_a_copy() -> None:
    model, value = build("meta"), torch.ones(4, 3)
    set_module_tensor_to_device(model, "0.weight", "cpu", value)
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.data_ptr() == value.data_ptr()
    assert model[0].bias.device.type == "meta", "the others stay"


def test_the_old_tensor_is_not_changed() -> None:
    model = build()
    old = model[0].weight
    before = old.detach().clone()
    set_module_tensor_to_device(model, "0.weight", "cpu", torch.zeros(4, 3))
    assert model[0].weight is not old
    assert torch.equal(old, before)


def test_a_parameter_keeps_its_attributes() -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    model[0].weight.note = "mine"
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert (model[0].weight.requires_grad, model[0].weight.note) == (False, "mine")
    assert model[0].weight.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "value", "dtype", "expected"),
    [
        ("0.weight", torch.zeros(4, 3, dtype=torch.bfloat16), None, torch.float32),
        ("0.weight", torch.zeros(4, 3), torch.float16, torch.float16),
        ("0.weight", torch.zeros(4, 3), "bfloat16", torch.bfloat16),
        ("0.weight", torch.zeros(4, 3).long(), None, torch.float32),
        ("1.running_mean", torch.zeros(4), "torch.float16", torch.float16),
        ("1.num_batches_tracked", torch.tensor(7), torch.float16, torch.int64),
    ],
)
def test_a_value_gets_the_dtype_of_the_tensor_or_the_argument(
    name: str, value: torch.Tensor, dtype: Any, expected: torch.dtype
) -> None:
    model = build()
    set_module_tensor_to_device(model, name, "cpu", value, dtype)
    found = dict([*model.named_parameters(), *model.named_buffers()])[name]
    assert found.dtype == expected
    assert torch.equal(found.double(), value.double())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("0.nope", {}, "tensor_name='0.nope': this Sequential has no parameter or buffer"),
        ("7.weight", {}, "tensor_name='7.weight'"),
        ("0.weight", {"value": torch.ones(4, 2)}, r"value=\(4, 2\): 0.weight has the shape \(4, 3\)"),
        ("0.weight", {"dtype": "float17"}, "dtype='float17'"),
    ],
)
def test_mistakes_are_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        set_module_tensor_to_device(build(), name, "cpu", **arguments)


def test_a_tensor_on_meta_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="0.weight is on the meta device and has no value"):
        set_module_tensor_to_device(build("meta"), "0.weight", "cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_number_needs_an_accelerator() -> None:
    with pytest.raises(ConfigurationError, match="device=0: numbers are those of accelerators"):
        set_module_tensor_to_device(build(), "0.weight", 0)


def test_a_shared_tensor_is_moved_once() -> None:
    model, value = build("meta"), torch.ones(4, 3, dtype=torch.float64)
    shared: dict[int, dict[torch.device, torch.Tensor]] = {value.data_ptr(): {}}
    set_module_tensor_to_device(model, "0.weight", "cpu", value, tied_params_map=shared)
    first = model[0].weight
    assert shared[value.data_ptr()][torch.device("cpu")] is first
    set_module_tensor_to_device(model, "0.weight", "cpu", value, tied_params_map=shared)
    assert model[0].weight is first


class Packed(nn.Parameter):
    """A parameter as other libraries derive them: with arguments of its own, kept as attributes."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, factor: float = 1.0) -> Any:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.factor = factor
        return made


def test_parameters_of_other_classes_keep_their_class() -> None:
    model = nn.Module()
    model.weight = Packed(torch.ones(2), requires_grad=False, factor=3.0)
    set_module_tensor_to_device(model, "weight", "cpu", torch.zeros(2), fp16_statistics=torch.tensor(0.5))
    weight: Any = model.weight
    assert (type(weight), weight.factor, weight.requires_grad) == (Packed, 3.0, False)
    assert weight.SCB == 0.5
    assert weight.tolist() == [0, 0]


def test_the_longest_prefix_decides_the_device() -> None:
    places = {"": "cpu", "a": 1, "a.b": "disk", "a.b.weight": 2}
    names = ("a.b.weight", "a.b.bias", "a.c", "ab")
    assert [mapped_device(name, places) for name in names] == [2, "disk", 1, "cpu"]
    assert mapped_device("b", {"a": 0}) is None


def test_devices_and_storages() -> None:
    pairs = [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda"), ("cpu", "meta")]
    same = [check_device_same(torch.device(a), torch.device(b)) for a, b in pairs]
    assert same == [True, True, False, False]
    tensor = torch.ones(4)
    assert id_tensor_storage(tensor) == id_tensor_storage(tensor[2:])
    assert id_tensor_storage(tensor)[2] == 16
    assert id_tensor_storage(tensor) != id_tensor_storage(tensor.clone())
    assert read_dtype("torch.float16") == torch.float16
