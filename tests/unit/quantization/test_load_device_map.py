"""The device of each module of a quantized model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.devices import hardware_table
from accelerate.quantization import get_quantized_model_device_map, name_unquantized, replace_with_bnb_layers
from accelerate.quantization.load import _dtypes_of_rest
from accelerate.utils import BnbQuantizationConfig

EIGHT = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["head"])
FOUR = BnbQuantizationConfig(load_in_4bit=True, skip_modules=["head"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process computes on GPU 1."""
    monkeypatch.setattr(hardware_table, "detect", lambda: hardware_table.CUDA)
    monkeypatch.setattr(type(hardware_table.CUDA), "current", lambda self: 1)


def test_the_default_device_of_a_quantized_model_is_that_of_the_process(body: Any) -> None:
    assert get_quantized_model_device_map(body(), FOUR) == {"": "cpu"}


def test_the_default_device_is_the_current_accelerator(body: Any, gpu: None) -> None:
    assert get_quantized_model_device_map(body(), FOUR) == {"": 1}


@pytest.mark.parametrize("how", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_device_maps_are_planned_for_the_size_in_bits(how: str, body: Any, gpu: None) -> None:
    model = body()
    # Bytes in 8 bits: 768 of the embedding, 8192 + 256 and 8192 of the layers, 768 of the head.
    limits = {0: 18_000, "cpu": "1GB"}
    assert get_quantized_model_device_map(model, EIGHT, how, {0: 40_000, "cpu": "1GB"}) == {"": 0}
    found = get_quantized_model_device_map(model, FOUR, how, limits)
    assert found == {"": 0}, "in 4 bits it fits"
    assert "cpu" in get_quantized_model_device_map(model, EIGHT, how, limits).values()


def test_dtypes_of_all_that_is_not_quantized(body: Any, bitsandbytes: Any) -> None:
    model = body()
    model.register_buffer("angles", torch.ones(2), persistent=False)
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    config = BnbQuantizationConfig(
        load_in_8bit=True, skip_modules=["head"], keep_in_fp32_modules=["embedding"]
    )
    expected = {
        "embedding.weight": torch.float32,
        "layers.0.bias": torch.float16,
        "head.weight": torch.float16,
        "angles": torch.float32,
        "count": torch.int64,
    }
    assert _dtypes_of_rest(model, config) == expected
    replace_with_bnb_layers(model, config, config.unquantized_modules)
    assert _dtypes_of_rest(model, config) == expected, "the same once layers are swapped"


def test_layers_in_four_bits_cannot_be_offloaded(body: Any, gpu: None) -> None:
    with pytest.raises(ConfigurationError, match="layers.2.weight on the CPU or the disk.*skip_modules"):
        get_quantized_model_device_map(body(), FOUR, {"": 0, "layers.2": "cpu"})
    places = {"": 0, "layers.2": "cpu"}
    assert get_quantized_model_device_map(body(), EIGHT, places) is places


def test_the_cpu_may_run_all_layers_in_four_bits(body: Any) -> None:
    assert get_quantized_model_device_map(body(), FOUR, {"": "cpu"}) == {"": "cpu"}
    with pytest.raises(ConfigurationError, match="4 bits cannot"):
        get_quantized_model_device_map(body(), FOUR, {"": "cpu", "layers": "disk"})


def test_an_unknown_device_map_name_is_refused_with_the_known_ones(body: Any) -> None:
    with pytest.raises(
        ConfigurationError, match="device_map='fast'.*auto, balanced, balanced_low_0, sequential"
    ):
        get_quantized_model_device_map(body(), FOUR, "fast")


def test_modules_that_stay_have_names(body: Any, gpu: None) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True)
    assert name_unquantized(body(), config, None).skip_modules == ["head"]
    assert name_unquantized(body(), config, {"": 0, "layers.2": "cpu"}).skip_modules == ["head", "layers.2"]
    assert name_unquantized(body(), EIGHT, {"": 0, "layers.2": "cpu"}).skip_modules == ["head"]
    chosen = BnbQuantizationConfig(load_in_4bit=True, skip_modules=[])
    assert name_unquantized(body(), chosen, "auto").skip_modules == []
    assert config.skip_modules is None, "the user's own object stays"
    assert isinstance(body(), nn.Module)
