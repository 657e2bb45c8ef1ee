"""A model is loaded, quantized and placed in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accelerate import init_empty_weights
from accelerate.base import CheckpointError, ConfigurationError, MissingPackageError
from accelerate.big_modeling import keep_in_memory
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model

WAYS = {
    "8 bits": {"load_in_8bit": True, "torch_dtype": "fp32"},
    "4 bits": {"load_in_4bit": True, "torch_dtype": "fp32"},
}
TOLERANCE = {"8 bits": 0.02, "4 bits": 0.3}
TOKENS = torch.arange(6)


def is_near(model: Any, expected: torch.Tensor, way: str) -> bool:
    with torch.no_grad():
        difference = (model(TOKENS) - expected).abs().max() / expected.abs().max()
    return bool(0 < difference < TOLERANCE[way])


@pytest.fixture
def plain(body: Any) -> Any:
    return body().eval()


@pytest.fixture
def expected(plain: Any) -> torch.Tensor:
    with torch.no_grad():
        return plain(TOKENS)


@pytest.fixture
def file(plain: Any, tmp_path: Path) -> Path:
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}])
def test_a_model_computes_nearly_the_same(
    way: str,
    is_empty: bool,
    device_map: Any,
    plain: Any,
    expected: Any,
    file: Path,
    body: Any,
    bitsandbytes: Any,
) -> None:
    config = BnbQuantizationConfig(**WAYS[way])
    if is_empty:
        with init_empty_weights():
            model = body().eval()
        model = load_and_quantize_model(model, config, file, device_map)
    else:
        model = load_and_quantize_model(plain, config, device_map=device_map)
        assert model is plain
    assert is_near(model, expected, way)
    assert model.layers[0].weight.dtype in (torch.int8, torch.uint8)
    assert model.head.weight.dtype == torch.float32
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (way == "8 bits", way == "4 bits")
    assert model.hf_device_map == {"": "cpu"}


@pytest.mark.parametrize("is_empty", [True, False])
def test_dtypes_of_all_that_is_not_quantized(
    is_empty: bool, plain: Any, file: Path, body: Any, bitsandbytes: Any
):
    config = BnbQuantizationConfig(load_in_8bit=True, keep_in_fp32_modules=["embedding"])
    model = plain
    if is_empty:
        with init_empty_weights():
            model = body()
    for module in (model,):
        module.register_buffer("angles", torch.ones(2), persistent=False)
    load_and_quantize_model(model, config, file if is_empty else None)
    found = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert found == {
        "embedding.weight": torch.float32,
        "layers.0.weight": torch.int8,
        "layers.0.bias": torch.float16,
        "layers.2.weight": torch.int8,
        "head.weight": torch.float16,
        "angles": torch.float32,
    }


@pytest.mark.parametrize("is_empty", [True, False])
def test_tied_weights_stay_tied(is_empty: bool, body: Any, tmp_path: Path, bitsandbytes: Any) -> None:
    model = body(tied=True).eval()
    with torch.no_grad():
        expected = model(TOKENS)
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    if is_empty:
        with init_empty_weights():
            model = body(tied=True).eval()
    config = BnbQuantizationConfig(**WAYS["8 bits"])
    load_and_quantize_model(model, config, tmp_path if is_empty else None)
    assert model.head.weight is model.embedding.weight
    assert is_near(model, expected, "8 bits")


def test_invalid_arguments_are_refused_before_anything_is_changed(
    plain: Any, body: Any, file: Path, bitsandbytes: Any
) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    with init_empty_weights():
        empty = body()
    with pytest.raises(ConfigurationError, match="Pass weights_location"):
        load_and_quantize_model(empty, config)
    with pytest.raises(ConfigurationError, match="gives no device to head.weight"):
        load_and_quantize_model(plain, config, device_map={"layers": "cpu", "embedding": "cpu"})
    with pytest.raises(ConfigurationError, match="weights in memory already"):
        load_and_quantize_model(plain, config, device_map={"": "cpu", "layers": "disk"})
    assert type(plain.layers[0]) is torch.nn.Linear


def test_weights_are_offloaded_to_the_disk_in_eight_bits(
    body: Any, file: Path, tmp_path: Path, expected: Any, bitsandbytes: Any
) -> None:
    with init_empty_weights():
        model = body().eval()
    config = BnbQuantizationConfig(**WAYS["8 bits"])
    places = {"": "cpu", "layers.2": "disk"}
    load_and_quantize_model(model, config, file, places, offload_folder=tmp_path / "disk")
    assert model.hf_device_map == places
    assert (tmp_path / "disk" / "layers.2.weight.dat").stat().st_size == 64 * 128
    layer = model.layers[2]
    for _ in range(2):
        assert is_near(model, expected, "8 bits")
        assert layer.weight.device.type == "meta"
        assert layer.state.CB is None, "nothing of it stays in memory"


def test_weights_are_offloaded_to_memory_in_eight_bits(plain: Any, expected: Any, bitsandbytes: Any) -> None:
    model = load_and_quantize_model(plain, BnbQuantizationConfig(**WAYS["8 bits"]))
    kept = keep_in_memory(model, ["layers.0.weight", "layers.0.bias", "head.weight"], None, "cpu")
    assert kept.keys() == {"layers.0.weight", "layers.0.bias", "head.weight", "layers.0.SCB"}
    first = model.layers[0]
    hook = AlignDevicesHook(
        "cpu", offload=True, weights_map={k.removeprefix("layers.0."): v for k, v in kept.items()}
    )
    add_hook_to_module(first, hook)
    assert (first.weight.CB, first.weight.SCB) == (None, None)
    for _ in range(2):
        assert is_near(model, expected, "8 bits")
        assert first.weight.device.type == "meta"


def test_values_that_no_file_has_are_named(body: Any, file: Path, bitsandbytes: Any) -> None:
    with init_empty_weights():
        model = body()
    with torch.device("meta"):
        model.register_buffer("angles", torch.ones(2), persistent=False)
    with pytest.raises(CheckpointError, match="no value for angles.*include_buffers=False"):
        load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True), file)


def test_without_bitsandbytes(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.base.packages.Package.version", lambda self: None)
    with pytest.raises(MissingPackageError, match="load_in_8bit needs bitsandbytes"):
        load_and_quantize_model(plain, BnbQuantizationConfig(load_in_8bit=True))


def test_other_objects_are_no_quantization_config(body: Any) -> None:
    with pytest.raises(
        ConfigurationError, match="bnb_quantization_config=.*it is not a BnbQuantizationConfig"
    ):
        load_and_quantize_model(body(), {"load_in_4bit": True})  # type: ignore[arg-type]
