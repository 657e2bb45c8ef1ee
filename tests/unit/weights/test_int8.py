"""Weights that are quantized to 8 bits and stored."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import MissingPackageError, Package
from accelerate.weights import load_offloaded_weights, quantize_and_offload_8bit, save_offload_index

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


def test_other_parameters_are_stored_as_they_are(tmp_path: Path) -> None:
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
