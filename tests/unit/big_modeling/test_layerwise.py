from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.big_modeling import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, attach_layerwise_casting_hooks

SMALL, FULL = torch.bfloat16, torch.float32


def build() -> nn.ModuleDict:
    block = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 1), "norm": nn.LayerNorm(4)})
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "block": block, "head": nn.Linear(4, 5)})


def small(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[0] for name, each in model.named_parameters() if each.dtype == SMALL}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"block.conv", "head"}),
        ({"skip_modules_pattern": ["head"]}, {"block.conv"}),
        ({"skip_modules_pattern": "^block$"}, {"head"}),
        ({"skip_modules_pattern": ("conv", "he.d")}, set()),
        ({"skip_modules_classes": (nn.Linear,)}, {"block.conv"}),
        ({"skip_modules_classes": (nn.ModuleDict,)}, set()),
    ],
)
def test_which_layers(options: dict[str, object], expected: set[str]) -> None:
    model = build()
    attach_layerwise_casting_hooks(model, SMALL, FULL, **options)  # type: ignore[arg-type]
    assert small(model) == expected


def test_layers_compute_in_the_larger_format() -> None:
    layer = nn.Linear(4, 4)
    attach_layerwise_casting_hooks(layer, SMALL, FULL)
    assert layer(torch.ones(1, 4)).dtype == FULL
    assert small(layer) == {""}
    assert nn.Linear in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
