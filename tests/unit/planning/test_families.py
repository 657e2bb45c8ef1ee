"""Plans of many families of models, beside the allocations of steps that run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accelerate import Accelerator

PATH = Path(__file__).parents[3] / "benchmarks" / "families.py"
IN_GATE = [
    "Mixtral",
    "Wav2Vec2 CTC",
    "nn.LSTM",
    "Conv2d without norm",
    "Llama with a mask",
    "Conv2d channels_last",
    "BatchNorm1d transposed",
    "Gradient penalty",
    "MSE loss",
    "Orthogonal layer",
]


def load() -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location("families", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["families"]
    return module


FAMILIES = load()


def check(name: str) -> None:
    family = FAMILIES.families()[name]
    predicted, allocated = FAMILIES.plan_and_run(family, Accelerator(cpu=True))
    difference = 100 * (predicted / allocated - 1)
    assert -family.below < difference < family.budget


@pytest.mark.parametrize("name", IN_GATE)
@pytest.mark.usefixtures("states")
def test_a_plan_has_the_allocations_of_a_step(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES.families() if name not in IN_GATE])
@pytest.mark.usefixtures("states")
@pytest.mark.filterwarnings("ignore:.*Transformer2DModelOutput:FutureWarning")  # of a module of diffusers
def test_the_plan_of_each_family_has_the_allocations_of_a_step(name: str) -> None:
    if name in FAMILIES.MODELS_OF_DIFFUSERS:
        pytest.importorskip("diffusers")
    check(name)
