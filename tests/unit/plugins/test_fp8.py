"""FP8 recipes, given or from the environment."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

from accelerate.base import ConfigurationError, MissingPackageError
from accelerate.plugins import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    low_precision,
)


@dataclass(frozen=True)
class Float8LinearConfig:
    pad_inner_dim: bool = False
    enable_fsdp_float8_all_gather: bool = False


@pytest.fixture
def _torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torchao.float8")
    module.Float8LinearConfig = Float8LinearConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    monkeypatch.setattr(low_precision, "require", lambda package, feature: None)


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)


def test_transformer_engine_has_these_defaults() -> None:
    assert TERecipeKwargs().to_dict() == {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
    }


def test_transformer_engine_is_filled_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(
        monkeypatch,
        USE_AUTOCAST_DURING_EVAL="True",
        MARGIN="2",
        FORMAT="E4M3",
        AMAX_COMPUTE_ALGO="max",
        OVERRIDE_WGRAD="true",
        USE_MXFP8_BLOCK_SCALING="1",
    )
    recipe = TERecipeKwargs(margin=5)
    assert (recipe.margin, recipe.interval, recipe.fp8_format) == (5, 1, "E4M3")
    assert recipe.amax_compute_algo == "max"
    assert recipe.override_linear_precision == (False, False, True)
    assert recipe.use_autocast_during_eval
    assert recipe.use_mxfp8_block_scaling


@pytest.mark.parametrize(
    "wrong", [{"fp8_format": "E3M4"}, {"amax_compute_algo": "mean"}, {"interval": 0}, {"margin": -1}]
)
def test_unknown_settings_of_transformer_engine_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        TERecipeKwargs(**wrong)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, MARGIN="two")
    with pytest.raises(ConfigurationError, match="ACCELERATE_FP8_MARGIN"):
        TERecipeKwargs()


def test_ms_amp_has_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MSAMPRecipeKwargs().opt_level == "O2"
    set_variables(monkeypatch, OPT_LEVEL="O1")
    assert MSAMPRecipeKwargs().opt_level == "O1"
    with pytest.raises(ConfigurationError, match="opt_level='O3'"):
        MSAMPRecipeKwargs(opt_level="O3")  # type: ignore[arg-type]


@pytest.mark.usefixtures("_torchao")
def test_torchao_gets_a_configuration_from_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AORecipeKwargs().config == Float8LinearConfig(True, True)
    assert AORecipeKwargs(pad_inner_dim=False).config == Float8LinearConfig(False, True)
    set_variables(monkeypatch, ENABLE_FSDP_FLOAT8_ALL_GATHER="0")
    assert AORecipeKwargs().config == Float8LinearConfig(True, False)


def test_a_given_configuration_is_kept() -> None:
    mine: Any = Float8LinearConfig()
    assert AORecipeKwargs(config=mine).config is mine
    with pytest.raises(ConfigurationError, match="pad_inner_dim=True"):
        AORecipeKwargs(config=mine, pad_inner_dim=True)


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str, feature: str) -> None:
        raise MissingPackageError(f"{feature} needs {package}")

    monkeypatch.setattr(low_precision, "require", refuse)
    with pytest.raises(MissingPackageError, match="AORecipeKwargs needs torchao"):
        AORecipeKwargs()


def test_the_older_recipe_has_settings_of_both_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FP8RecipeKwargs(backend="msamp", opt_level="O1", fp8_format="e4m3")  # type: ignore[arg-type]
    assert (recipe.backend, recipe.opt_level, recipe.fp8_format) == ("MSAMP", "O1", "E4M3")
    set_variables(monkeypatch, BACKEND="te")
    assert FP8RecipeKwargs().backend == "TE"
    set_variables(monkeypatch, BACKEND="ao")
    with pytest.raises(ConfigurationError, match="backend='AO'"):
        FP8RecipeKwargs()


@pytest.mark.parametrize(
    ("engine", "msamp", "chosen"), [(False, True, "MSAMP"), (True, True, "TE"), (False, False, "TE")]
)
def test_the_older_recipe_uses_the_installed_backend(
    monkeypatch: pytest.MonkeyPatch, engine: bool, msamp: bool, chosen: str
) -> None:
    monkeypatch.setattr(low_precision, "is_transformer_engine_available", lambda: engine)
    monkeypatch.setattr(low_precision, "is_msamp_available", lambda: msamp)
    assert FP8RecipeKwargs().backend == chosen
