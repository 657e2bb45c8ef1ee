"""FP8 through MS-AMP, replaced by a module that records its calls."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.base import ConfigurationError, PreparationError
from accelerate.plugins import MSAMPRecipeKwargs
from accelerate.precision import MsAmpPrecision


def make() -> MsAmpPrecision:
    with pytest.warns(FutureWarning, match="no longer maintained"):
        return MsAmpPrecision("cuda", MSAMPRecipeKwargs(opt_level="O1"))


def test_ms_amp_needs_cuda() -> None:
    with pytest.raises(ConfigurationError, match="this run is on cpu"):
        MsAmpPrecision("cpu", MSAMPRecipeKwargs())


def test_model_and_optimizer_are_changed_together(states: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Changed(torch.optim.SGD):
        pass

    def initialize(model: nn.Module, optimizer: Any, opt_level: str) -> tuple[nn.Module, Any]:
        seen.append((model, optimizer, opt_level))
        return model, Changed(model.parameters(), lr=0.1)

    module = ModuleType("msamp")
    module.initialize = initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "msamp", module)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator._runtime.strategy, "precision", make())
    monkeypatch.setattr(accelerator._runtime.strategy.precision, "convert", lambda model: model)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, stepped = accelerator.prepare(model, optimizer)
    assert seen == [(model, optimizer, "O1")]
    assert type(stepped.optimizer) is Changed
    assert prepared is model


@pytest.mark.parametrize("count", [0, 2])
def test_one_model_needs_one_optimizer(count: int) -> None:
    with pytest.raises(PreparationError, match=f"1 models and {count} optimizers"):
        make().initialize([nn.Linear(1, 1)], [object()] * count)
