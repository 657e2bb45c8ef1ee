"""Which layers are swapped for those of bitsandbytes, and what they keep."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import MissingPackageError, Package
from accelerate.plugins import BnbQuantizationConfig
from accelerate.quantization import (
    get_keys_to_not_convert,
    get_parameter_device,
    has_4bit_bnb_layers,
    replace_with_bnb_layers,
)

EIGHT = {"load_in_8bit": True, "llm_int8_threshold": 5.0}
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bf16"}


def kinds(model: nn.Module) -> dict[str, str]:
    return {
        name: type(layer).__name__ for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }


@pytest.mark.parametrize(("settings", "kind"), [(EIGHT, "Linear8bitLt"), (FOUR, "Linear4bit")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_linear_layers_are_swapped(
    settings: Any, kind: str, device: str, bitsandbytes: Any, body: Any
) -> None:
    with torch.device(device):
        model = body().eval()
    before = model.layers[0]
    assert replace_with_bnb_layers(model, BnbQuantizationConfig(**settings), ["head"]) is model
    assert kinds(model) == {"layers.0": kind, "layers.2": kind, "head": "Linear"}
    layer = model.layers[0]
    assert (layer.training, layer.weight.requires_grad, layer.bias.requires_grad) == (False, False, False)
    assert layer.weight.device.type == device
    assert layer.weight.data_ptr() == before.weight.data_ptr()
    assert layer.bias is before.bias
    assert model.layers[2].bias is None


def test_settings_are_applied_to_the_layers(bitsandbytes: Any, body: Any) -> None:
    eight = replace_with_bnb_layers(body(), BnbQuantizationConfig(**EIGHT))
    assert eight.layers[0].state.threshold == 5.0
    assert eight.layers[0].weight.has_fp16_weights is False
    four = replace_with_bnb_layers(body(), BnbQuantizationConfig(**FOUR, bnb_4bit_use_double_quant=True))
    layer = four.layers[0]
    assert layer.compute_dtype == torch.bfloat16
    assert (layer.weight.quant_type, layer.weight.compress_statistics) == ("nf4", True)
    assert layer.weight.module is layer
    assert has_4bit_bnb_layers(four)
    assert not has_4bit_bnb_layers(eight)


@pytest.mark.parametrize(
    ("kept", "prefix", "swapped"),
    [
        (["layers"], None, {"head"}),
        (["layers.2"], None, {"head", "layers.0"}),
        (["0"], None, {"head", "layers.2"}),
        (["model.head"], ["model"], {"layers.0", "layers.2"}),
        (["lay"], None, {"head", "layers.0", "layers.2"}),
    ],
)
def test_names_of_modules_that_stay(
    kept: list[str], prefix: Any, swapped: set[str], bitsandbytes: Any, body: Any
) -> None:
    model = replace_with_bnb_layers(body(), BnbQuantizationConfig(**EIGHT), kept, prefix)
    assert {name for name, kind in kinds(model).items() if kind != "Linear"} == swapped


def test_subclasses_with_another_forward_are_not_converted(bitsandbytes: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    model = nn.ModuleDict({"a": Doubled(2, 2), "b": Named(2, 2), "c": nn.MultiheadAttention(2, 1)})
    config = BnbQuantizationConfig(**EIGHT)
    replace_with_bnb_layers(model, config)
    assert kinds(model) == {
        "a": "Doubled",
        "b": "Linear8bitLt",
        "c.out_proj": "NonDynamicallyQuantizableLinear",
    }
    first = model["b"]
    replace_with_bnb_layers(model, config)
    assert model["b"] is first, "what is swapped already stays"


def test_a_model_without_such_layers_gives_a_warning(
    bitsandbytes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        replace_with_bnb_layers(nn.Sequential(nn.ReLU()), BnbQuantizationConfig(**EIGHT))
    assert "No linear layer of this Sequential is quantized" in caplog.text


@pytest.mark.parametrize(("settings", "name"), [(EIGHT, "load_in_8bit"), (FOUR, "load_in_4bit")])
def test_without_bitsandbytes(settings: Any, name: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "version", lambda self: None)
    with pytest.raises(MissingPackageError, match=f"{name} needs bitsandbytes.*pip install"):
        replace_with_bnb_layers(body(), BnbQuantizationConfig(**settings))


def test_the_output_layer_and_tied_ones_are_not_converted(body: Any) -> None:
    assert get_keys_to_not_convert(body()) == ["head"]
    assert get_keys_to_not_convert(body(tied=True)) == ["embedding", "head"]
    assert get_keys_to_not_convert(nn.Linear(2, 2)) == []


def test_bodies_without_an_output_layer_are_converted_whole(body: Any) -> None:
    class Bare(body):
        base_model_prefix = "model"

    class Around(nn.Module):
        base_model_prefix = "model"

        def __init__(self, head: bool) -> None:
            super().__init__()
            self.model = Bare()
            if head:
                self.lm_head = nn.Linear(2, 2)

    assert get_keys_to_not_convert(Bare()) == []
    assert get_keys_to_not_convert(Bare(tied=True)) == ["embedding", "head"]
    assert get_keys_to_not_convert(Around(head=False)) == []
    assert get_keys_to_not_convert(Around(head=True)) == ["lm_head"]


def test_device_of_a_module() -> None:
    assert get_parameter_device(nn.Linear(1, 1, device="meta")).type == "meta"
