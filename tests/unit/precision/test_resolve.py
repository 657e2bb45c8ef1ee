"""The number format is chosen in one place, from one table."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from accelerate.base import ConfigurationError, MissingPackageError
from accelerate.devices import CPU
from accelerate.plugins import FP8RecipeKwargs, KwargsHandler, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.precision import (
    MixedPrecision,
    Precision,
    PrecisionRequest,
    ScaledPrecision,
    resolve_precision,
)
from accelerate.state import PartialState

module = sys.modules[resolve_precision.__module__]


@pytest.mark.parametrize(
    ("name", "kind"), [("no", Precision), ("bf16", MixedPrecision), ("fp16", ScaledPrecision)]
)
def test_each_name_has_its_class(name: str, kind: type[Precision]) -> None:
    precision = resolve_precision(PrecisionRequest(name, CPU))
    assert type(precision) is kind
    assert precision.name == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision='fp4'.*no, bf16, fp16, fp8"):
        resolve_precision(PrecisionRequest("fp4", CPU))


class Library:
    """Replaces the three FP8 libraries: which are installed, and which was chosen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
        rows = {
            name: row._replace(
                is_installed=lambda name=name: name in installed,
                build=lambda request, recipe, name=name: (name, recipe),
            )
            for name, row in module._FP8.items()
        }
        monkeypatch.setattr(module, "_FP8", rows)

    def choose(self, *recipes: KwargsHandler, named: str | None = None) -> Any:
        return resolve_precision(PrecisionRequest("fp8", CPU, recipes=recipes, fp8_library=named))


@pytest.mark.parametrize(
    ("installed", "named", "chosen"),
    [
        ((), None, "AO"),
        (("TE",), None, "TE"),
        (("MSAMP", "TE"), None, "TE"),
        (("AO", "TE"), "te", "TE"),
        (("AO",), "MSAMP", "MSAMP"),
    ],
)
def test_the_fp8_library_is_the_one_named_or_the_first_installed(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], named: str | None, chosen: str
) -> None:
    library, recipe = Library(monkeypatch, *installed).choose(named=named)
    assert library == chosen
    assert type(recipe) is module._FP8[chosen].recipe


def test_a_recipe_decides_before_the_launch_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = TERecipeKwargs()
    assert Library(monkeypatch, "AO").choose(recipe, named="ao") == ("TE", recipe)
    joint = FP8RecipeKwargs(backend="MSAMP")
    assert Library(monkeypatch).choose(joint) == ("MSAMP", joint)


def test_two_recipes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="TERecipeKwargs.*MSAMPRecipeKwargs"):
        Library(monkeypatch).choose(TERecipeKwargs(), MSAMPRecipeKwargs())


def test_an_unknown_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="fp8_backend='FOO'.*AO, TE, MSAMP"):
        Library(monkeypatch).choose(named="foo")


def test_a_recipe_for_another_format_gives_a_warning(states: None, caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    resolve_precision(PrecisionRequest("bf16", CPU, recipes=[TERecipeKwargs()]))
    assert "TERecipeKwargs has no effect" in caplog.text


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str, feature: str) -> None:
        raise MissingPackageError(f"{feature} needs {package}")

    monkeypatch.setattr(module, "require", refuse)
    with pytest.raises(MissingPackageError, match="needs torchao"):
        resolve_precision(PrecisionRequest("fp8", CPU, fp8_library="ao"))


def test_ms_amp_is_refused() -> None:
    for request in (
        PrecisionRequest("fp8", CPU, fp8_library="msamp"),
        PrecisionRequest("fp8", CPU, recipes=[MSAMPRecipeKwargs()]),
    ):
        with pytest.raises(ConfigurationError, match="fp8_backend='MSAMP'.*no longer maintained.*torchao"):
            resolve_precision(request)
