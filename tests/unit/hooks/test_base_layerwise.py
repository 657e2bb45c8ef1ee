from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
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
def test_patterns_select_the_layers(options: dict[str, object], expected: set[str]) -> None:
    model = build()
    attach_layerwise_casting_hooks(model, SMALL, FULL, **options)  # type: ignore[arg-type]
    assert small(model) == expected


def test_layers_compute_in_the_larger_format() -> None:
    layer = nn.Linear(4, 4)
    attach_layerwise_casting_hooks(layer, SMALL, FULL)
    assert layer(torch.ones(1, 4)).dtype == FULL
    assert small(layer) == {""}
    assert nn.Linear in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


def test_weights_that_an_embedding_shares_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.body(self.embed(x)))
            return found

    model = Tied()
    attach_layerwise_casting_hooks(model, "float16", "float32")
    assert model.body.weight.dtype == torch.float16
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype == torch.float32
    assert model(torch.tensor([1, 2])).shape == (2, 5)


@pytest.mark.parametrize(
    ("dtype", "pattern", "said"),
    [("float61", None, "dtype='float61'"), ("float16", "(", "skip_modules_pattern=.*not a regular")],
)
def test_unsupported_dtypes_and_layers_are_refused(dtype: str, pattern: str | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        attach_layerwise_casting_hooks(nn.Linear(2, 2), dtype, "float32", pattern)
