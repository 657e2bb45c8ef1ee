"""The same with the real bitsandbytes, on the CPU. Needs the package bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accelerate import init_empty_weights
from accelerate.base import CheckpointError
from accelerate.quantization import has_4bit_bnb_layers, replace_with_bnb_layers
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model, set_module_tensor_to_device
from accelerate.weights import quantize_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("states"), pytest.mark.filterwarnings("ignore")]
pytest.importorskip("bitsandbytes")

WAYS = {
    "8 bits": ({"load_in_8bit": True}, 0.03),
    "fp4": ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"}, 0.25),
    "nf4": (
        {
            "load_in_4bit": True,
            "bnb_4bit_compute_dtype": "fp32",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        0.2,
    ),
}
"""Name -> settings, and the largest deviation, relative to the largest output."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_computes_nearly_the_same(way: str, device: str, body: Any) -> None:
    settings, tolerance = WAYS[way]
    config = BnbQuantizationConfig(torch_dtype="fp32", **settings)
    plain = body().eval()
    tokens = torch.arange(6)
    with torch.no_grad():
        expected = plain(tokens)
    with torch.device(device):
        model = body().eval()
    replace_with_bnb_layers(model, config, ["head"])
    for name, value in plain.state_dict().items():
        set_module_tensor_to_device(model, name, "cpu", value, torch.float32)
    for _ in range(2):
        with torch.no_grad():
            difference = (model(tokens) - expected).abs().max() / expected.abs().max()
        assert 0 < difference < tolerance
        set_module_tensor_to_device(model, "layers.0.weight", "cpu", dtype=torch.float32)
    assert has_4bit_bnb_layers(model) is config.load_in_4bit


def test_rows_are_quantized_as_the_layer_does() -> None:
    from bitsandbytes.nn import Int8Params

    weight = torch.randn(4, 8)
    quantized, scales = quantize_rows(weight)
    by_itself = Int8Params(weight, requires_grad=False).to("cpu")
    assert torch.equal(quantized, by_itself.data)
    assert torch.equal(scales, by_itself.SCB)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device_map", [None, "auto"])
def test_a_model_is_loaded_in_one_pass(way: str, device_map: Any, body: Any, tmp_path: Path) -> None:
    settings, tolerance = WAYS[way]
    plain, tokens = body().eval(), torch.arange(6)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = plain(tokens)
    config = BnbQuantizationConfig(torch_dtype="fp32", **settings)
    with init_empty_weights():
        empty = body().eval()
    loaded = load_and_quantize_model(empty, config, tmp_path, device_map)
    for model in (loaded, load_and_quantize_model(plain, config)):
        with torch.no_grad():
            difference = (model(tokens) - expected).abs().max() / expected.abs().max()
        assert 0 < difference < tolerance


@pytest.mark.parametrize("way", WAYS)
def test_adapters_on_a_quantized_model_train(way: str, body: Any) -> None:
    from accelerate import Accelerator

    settings, _ = WAYS[way]
    model = load_and_quantize_model(body(), BnbQuantizationConfig(torch_dtype="fp32", **settings))
    model.head.weight.requires_grad_(True)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([model.head.weight, model.embedding.weight], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.embedding.weight.detach().clone()
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(torch.arange(6)), torch.arange(6))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(model.embedding.weight, before), "gradients go through quantized layers"


def test_quantized_weights_are_offloaded_to_the_disk(body: Any, tmp_path: Path) -> None:
    plain, tokens = body().eval(), torch.arange(6)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = body().eval()
    places = {"": "cpu", "layers.2": "disk"}
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    load_and_quantize_model(model, config, tmp_path, places, offload_folder=tmp_path / "disk")
    with torch.no_grad():
        expected = plain(tokens)
        for _ in range(2):
            difference = (model(tokens) - expected).abs().max() / expected.abs().max()
            assert 0 < difference < 0.03
    assert model.layers[2].state.CB is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("safe", [True, False])
def test_a_quantized_model_is_saved_and_loaded_unchanged(
    way: str, safe: bool, body: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from accelerate import Accelerator

    config, tokens = BnbQuantizationConfig(torch_dtype="fp32", **WAYS[way][0]), torch.arange(6)
    model = load_and_quantize_model(body().eval(), config)
    Accelerator(cpu=True).save_model(model, str(tmp_path), safe_serialization=safe)
    with torch.no_grad():
        expected = model(tokens)  # bitsandbytes rounds the scales of a model that has computed on the CPU
    with init_empty_weights():
        empty = body().eval()
    loaded = load_and_quantize_model(empty, config, tmp_path)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(loaded(tokens), expected)
    assert "does not fit" not in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_files_in_other_bits_are_refused(way: str, body: Any, tmp_path: Path) -> None:
    from accelerate import Accelerator, load_checkpoint_in_model

    config = BnbQuantizationConfig(torch_dtype="fp32", **WAYS[way][0])
    Accelerator(cpu=True).save_model(load_and_quantize_model(body(), config), str(tmp_path))
    bits = 8 if config.load_in_8bit else 4
    with pytest.raises(CheckpointError, match=f"is stored in {bits} bits, and its layer is not"):
        load_checkpoint_in_model(body(), tmp_path)
    other = {"load_in_8bit": bits == 4, "load_in_4bit": bits == 8}
    with init_empty_weights():
        empty = body()
    with pytest.raises(CheckpointError, match=f"is stored in {bits} bits, and its layer is not"):
        load_and_quantize_model(empty, BnbQuantizationConfig(**other), tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_training_of_adapters_resumes_from_a_checkpoint(way: str, body: Any, tmp_path: Path) -> None:
    from accelerate import Accelerator

    config = BnbQuantizationConfig(torch_dtype="fp32", **WAYS[way][0])
    accelerator, model = Accelerator(cpu=True), load_and_quantize_model(body(), config)
    model.head.weight.requires_grad_(True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([model.head.weight], lr=0.1))

    def steps() -> list[float]:
        losses = []
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(torch.arange(6)), torch.arange(6))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps()
    accelerator.save_state(str(tmp_path / "state"))
    first = steps()
    accelerator.load_state(str(tmp_path / "state"))
    assert steps() == first
    fresh = load_and_quantize_model(body(), config)
    torch.nn.init.zeros_(fresh.head.weight)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(torch.arange(6)), model(torch.arange(6)))
