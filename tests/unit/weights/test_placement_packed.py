"""Parameters that quantize themselves when they are moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.weights import (
    is_bnb_parameter,
    is_derived_parameter,
    is_packed_in_4_bits,
    scales_of,
    set_module_tensor_to_device,
)

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
