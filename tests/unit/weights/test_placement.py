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
    is_bnb_parameter,
    is_derived_parameter,
    is_packed_in_4_bits,
    mapped_device,
    read_dtype,
    scales_of,
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


WEIGHT = torch.tensor([[1.0, -2.0], [0.25, 0.125]])


class Int8Params(nn.Parameter):
    """Whole numbers and a factor; made from plain ones when it is moved."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **scales: Any) -> Any:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.CB, made.SCB = scales.get("CB"), scales.get("SCB")
        return made

    def to(self, device: Any) -> Int8Params:
        if self.dtype == torch.int8:
            data = torch.Tensor.to(self.data, device)
            return Int8Params(data, CB=data, SCB=None if self.SCB is None else self.SCB.to(device))
        self.SCB = self.data.float().abs().amax(dim=1)
        self.data = torch.round(self.data.float() * 127 / self.SCB[:, None]).to(torch.int8)
        self.CB = self.data
        return self


class Params4bit(nn.Parameter):
    """One number of a byte for each value, in a column; made from plain ones when it is moved."""

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = False,
        quant_state: Any = None,
        bnb_quantized: bool = False,
    ) -> Any:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.quant_state, made.bnb_quantized = quant_state, bnb_quantized
        return made

    def to(self, device: Any) -> Params4bit:
        if self.bnb_quantized:
            return Params4bit(torch.Tensor.to(self.data, device), **vars(self))
        self.quant_state = self.data.float().max()
        self.data = torch.round((self.data.float() / self.quant_state) * 7 + 8).to(torch.uint8).reshape(-1, 1)
        self.bnb_quantized = True
        return self


def layer(weight: nn.Parameter) -> Any:
    made: Any = nn.Module()
    made.weight = weight
    return made


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_plain_value_is_quantized_when_it_is_set(device: str, dtype: Any) -> None:
    holder = layer(Int8Params(torch.empty(2, 2, device=device)))
    set_module_tensor_to_device(holder, "weight", "cpu", WEIGHT, dtype)
    weight = holder.weight
    assert (type(weight), weight.dtype) == (Int8Params, torch.int8)
    assert weight.tolist() == [[64, -127], [127, 64]]
    assert weight.CB is not None
    assert weight.SCB.tolist() == [2.0, 0.25]
    assert WEIGHT[0, 0] == 1.0, "the value that was given is left alone"


def test_a_value_in_place_is_quantized_where_it_is() -> None:
    holder = layer(Int8Params(WEIGHT))
    set_module_tensor_to_device(holder, "weight", "cpu", dtype=torch.float16)
    assert holder.weight.dtype == torch.int8


def test_a_quantized_value_is_set_with_its_scales() -> None:
    holder = layer(Int8Params(torch.empty(2, 2, device="meta")))
    value, scales = torch.ones(2, 2).to(torch.int8), torch.tensor([0.5, 0.25])
    set_module_tensor_to_device(holder, "weight", "cpu", value, torch.int8, fp16_statistics=scales)
    assert holder.weight.tolist() == [[1, 1], [1, 1]]
    assert holder.weight.SCB.tolist() == [0.5, 0.25]
    assert holder.weight.CB.tolist() == [[1, 1], [1, 1]], "the layer computes with this one"


def test_scales_stored_in_the_state_of_the_layer_are_found() -> None:
    holder = layer(Int8Params(WEIGHT).to("cpu"))
    holder.state = nn.Module()
    holder.state.SCB = holder.weight.SCB
    holder.weight.SCB = holder.weight.CB = None
    assert scales_of(holder) is holder.state.SCB
    set_module_tensor_to_device(holder, "weight", "cpu", dtype=torch.int8)
    assert holder.weight.SCB.tolist() == [2.0, 0.25]


def test_packed_values_in_four_bits() -> None:
    holder = layer(Params4bit(torch.empty(2, 2, device="meta")))
    set_module_tensor_to_device(holder, "weight", "cpu", WEIGHT.abs(), torch.float16)
    first = holder.weight
    assert (first.shape, first.bnb_quantized, first.quant_state) == ((4, 1), True, 2.0)
    set_module_tensor_to_device(holder, "weight", "cpu", dtype=torch.float16)
    assert holder.weight.tolist() == first.tolist(), "what is packed is moved as it is"
    assert holder.weight.quant_state == 2.0
    set_module_tensor_to_device(holder, "weight", "cpu", torch.full((2, 2), 4.0))
    assert holder.weight.quant_state == 4.0, "a new value is quantized anew"
    set_module_tensor_to_device(holder, "weight", "meta")
    assert holder.weight.device.type == "meta"


def test_quantized_parameters_are_recognized() -> None:
    plain, eight, four = nn.Parameter(WEIGHT), Int8Params(WEIGHT), Params4bit(WEIGHT)
    assert [is_derived_parameter(each) for each in (plain, eight, four)] == [False, True, True]
    assert [is_bnb_parameter(each) for each in (plain, eight, four)] == [False, True, True]
    assert [is_packed_in_4_bits(each) for each in (plain, eight, four)] == [False, False, True]
    assert scales_of(layer(plain)) is None
    assert scales_of(nn.Module()) is None
