"""A bitsandbytes of a few lines: its layers in plain torch, with the attributes of the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import Package


def int8_vectorwise_quant(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scales = matrix.float().abs().amax(dim=1)
    return torch.round(matrix.float() * 127 / scales[:, None]).to(torch.int8), scales, None


class Int8Params(nn.Parameter):
    def __new__(cls, data: Any, requires_grad: bool = True, has_fp16_weights: bool = False, **scales: Any):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.CB, made.SCB = scales.get("CB"), scales.get("SCB")
        made.has_fp16_weights = has_fp16_weights
        return made

    def to(self, device: Any) -> Int8Params:
        device = torch.device(device)
        if self.dtype != torch.int8 and device.type != "meta":
            self.data, self.SCB, _ = int8_vectorwise_quant(self.data)
            self.CB = self.data
            return self
        moved = Int8Params(torch.Tensor.to(self.data, device), self.requires_grad)
        if self.dtype == torch.int8:
            moved.CB = moved.data
            moved.SCB = None if self.SCB is None else self.SCB.to(device)
        return moved


class Linear8bitLt(nn.Linear):
    def __init__(self, inputs, outputs, bias=True, has_fp16_weights=True, threshold=0.0, device=None) -> None:
        super().__init__(inputs, outputs, bias, device=device)
        self.state: Any = ModuleType("state")
        self.state.CB = self.state.SCB = None
        self.state.threshold = threshold
        self.weight = Int8Params(self.weight.data, has_fp16_weights, has_fp16_weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:  # the layer takes the scales over
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        weight = self.state.CB.float() * self.state.SCB[:, None] / 127
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)


class Params4bit(nn.Parameter):
    def __new__(
        cls,
        data: Any,
        requires_grad: bool = False,
        quant_state: Any = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        module: Any = None,
        bnb_quantized: bool = False,
    ):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.quant_state, made.compress_statistics, made.quant_type = (
            quant_state,
            compress_statistics,
            quant_type,
        )
        made.module, made.bnb_quantized = module, bnb_quantized
        return made

    def to(self, device: Any) -> Params4bit:
        device = torch.device(device)
        if not self.bnb_quantized and device.type != "meta":
            scale = self.data.float().abs().max()
            codes = torch.round(self.data.float() * 7 / scale + 8).to(torch.uint8).reshape(-1, 2)
            self.quant_state = (scale, self.data.shape)
            self.data = (codes[:, :1] * 16 + codes[:, 1:]).contiguous()
            self.bnb_quantized = True
            return self
        return Params4bit(torch.Tensor.to(self.data, device), **{"requires_grad": False, **vars(self)})


class Linear4bit(nn.Linear):
    def __init__(
        self,
        inputs,
        outputs,
        bias=True,
        compute_dtype=None,
        compress_statistics=True,
        quant_type="fp4",
        device=None,
    ) -> None:
        super().__init__(inputs, outputs, bias, device=device)
        self.compute_dtype = compute_dtype
        self.weight = Params4bit(
            self.weight.data, compress_statistics=compress_statistics, quant_type=quant_type, module=self
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shape = self.weight.quant_state
        codes = torch.cat([self.weight.data // 16, self.weight.data % 16], dim=1).reshape(shape)
        weight = (codes.float() - 8) * scale / 7
        return nn.functional.linear(
            x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the small bitsandbytes."""
    package: Any = ModuleType("bitsandbytes")
    package.nn, package.functional = ModuleType("bitsandbytes.nn"), ModuleType("bitsandbytes.functional")
    for kind in (Int8Params, Linear8bitLt, Params4bit, Linear4bit):
        setattr(package.nn, kind.__name__, kind)
    package.functional.int8_vectorwise_quant = int8_vectorwise_quant
    for module in (package, package.nn, package.functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    version = Package.version
    monkeypatch.setattr(
        Package, "version", lambda self: "0.50.2" if self.module == "bitsandbytes" else version(self)
    )
    return package


class Body(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 64)  # the real library's kernels want multiples of 64
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
        self.head = nn.Linear(64, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


@pytest.fixture
def body() -> type[Body]:
    """A small language model."""
    torch.manual_seed(0)
    return Body
