"""Streamed weights of one process: arguments, buckets, offloaded models, and adapters of peft."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator, cpu_offload, disk_offload
from accelerate.accelerator.weight_stream import Item, assign_to_buckets
from accelerate.base import ConfigurationError

pytestmark = pytest.mark.usefixtures("states")


class Mixed(nn.Module):
    """Tensors of several dtypes, one of them transposed, and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.low = nn.Linear(4, 4).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.last = nn.Linear(4, 6)
        self.last.weight = self.first.weight
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def streamed(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Accelerator(cpu=True).stream_weights(model, **options)}


def check_equal(streamed: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    assert streamed.keys() == saved.keys()
    for name, tensor in saved.items():
        assert streamed[name].dtype == tensor.dtype
        assert torch.equal(streamed[name], tensor)


def test_tensors_are_those_of_a_saved_model_without_copies(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Mixed())
    accelerator.save_model(model, tmp_path)
    check_equal(streamed(model), load_file(tmp_path / "model.safetensors"))
    for name, tensor in accelerator.stream_weights(model):
        assert not tensor.requires_grad
        assert tensor.is_contiguous()
        if name == "first.weight":
            assert tensor.data_ptr() == model.first.weight.data_ptr()


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_offloaded_weights_are_read(tmp_path: Path, offload: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    expected = copy.deepcopy(model.state_dict())
    folder = {"offload_dir": str(tmp_path)} if offload is disk_offload else {}
    offload(model, execution_device="cpu", **folder)
    check_equal(streamed(model, bucket_size=200), expected)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            95,
            r"bucket_size=95: smaller than first.weight, which has 96 bytes\. Pass bucket_size=96 or more\.",
        ),
        ("95B", r"bucket_size='95B': smaller than first.weight"),
        (-1, r"bucket_size=-1: smaller than"),
        ("much", r"bucket_size='much': not a size"),
        (1.5, r"bucket_size=1.5: not a size"),
        (True, r"bucket_size=True: not a size"),
    ],
)
def test_a_wrong_bucket_size_is_refused_before_the_loop(size: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True).stream_weights(Mixed(), bucket_size=size)


def test_values_that_cannot_be_saved_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="cannot be streamed: load its weights first"):
        accelerator.stream_weights(nn.Linear(2, 2, device="meta"))
    kind = type("Counted", (nn.Linear,), {"get_extra_state": lambda self: {"steps": 3}})
    with pytest.raises(ConfigurationError, match="safetensors holds tensors only"):
        accelerator.stream_weights(kind(2, 2))
    sparse = nn.Module()
    sparse.register_buffer("values", torch.eye(2).to_sparse())
    with pytest.raises(ConfigurationError, match="dense tensors only"):
        accelerator.stream_weights(sparse)


def test_a_model_without_weights_has_an_empty_stream() -> None:
    assert streamed(nn.ReLU()) == {}


def test_buckets_hold_consecutive_items() -> None:
    items = [Item(name, (name,)) for name in "abcde"]
    sizes = {"a": 3, "b": 2, "c": 5, "d": 0, "e": 1}
    buckets = assign_to_buckets(items, sizes, 5, 5)
    assert ["".join(item.name for item in bucket) for bucket in buckets] == ["ab", "cd", "e"]


# Adapters of peft


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.line = nn.Embedding(5, 4), nn.Linear(4, 6)
        self.conv, self.wide, self.point = nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 6, 1)
        self.low = nn.Linear(4, 4).to(torch.bfloat16)
        self.norm = nn.LayerNorm(4)


def adapted(model: nn.Module | None = None, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["words", "line", "conv", "wide", "point", "low"], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
        return peft.get_peft_model(model or Layers(), config)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["norm"]},
        {"use_rslora": True, "lora_alpha": 3},
        {"target_modules": ["line"], "lora_bias": True},
    ],
)
def test_each_kind_of_layer_is_merged_as_by_peft(options: dict[str, Any]) -> None:
    model = adapted(**options)
    before = copy.deepcopy(model.state_dict())
    merged = streamed(model, merge_adapters=True)
    check_equal(model.state_dict(), before)
    reference = model.merge_and_unload().state_dict()
    assert list(merged) == list(reference)
    for name, tensor in reference.items():
        torch.testing.assert_close(merged[name], tensor)
        assert merged[name].is_contiguous()


def test_all_active_adapters_and_merged_ones_count() -> None:
    model = adapted(target_modules=["line"])
    peft = pytest.importorskip("peft")
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["line"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    reference = copy.deepcopy(model).merge_and_unload().state_dict()
    merged = streamed(model, merge_adapters=True)
    torch.testing.assert_close(merged["line.weight"], reference["line.weight"])
    model.merge_adapter(["default"])
    merged = streamed(model, merge_adapters=True)
    torch.testing.assert_close(merged["line.weight"], reference["line.weight"])


def test_both_names_of_a_tied_weight_are_merged() -> None:
    model = Layers()
    model.head = nn.Linear(4, 5)
    model.head.weight = model.words.weight
    model = adapted(model, target_modules=["head"])
    merged = streamed(model, merge_adapters=True)
    reference = model.merge_and_unload().state_dict()
    assert "head.weight" not in merged
    torch.testing.assert_close(merged["words.weight"], reference["words.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True, "target_modules": ["line"]}, "base_model.model.line has DoraLinearVariant"),
        ({"trainable_token_indices": {"words": [1]}, "target_modules": ["line"]}, "only"),
    ],
)
def test_other_adapters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"merge_adapters=True: .*{re.escape(message)}"):
        streamed(adapted(**options), merge_adapters=True)


def test_other_methods_of_peft_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Layers(), peft.IA3Config(target_modules=["line"], feedforward_modules=[]))
    with pytest.raises(ConfigurationError, match=r"line has peft\.tuners\.ia3\.layer\.Linear"):
        streamed(model, merge_adapters=True)


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the model has no adapters of peft"):
        streamed(Layers(), merge_adapters=True)
