"""Marks skip where their need is not met, and only there."""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from accelerate.base import Package
from accelerate.devices import CPU, CUDA
from accelerate.test_utils import testing
from accelerate.test_utils.testing import requirements

MARKS = sorted(name for name in vars(testing) if name.startswith("require_") and "version" not in name)


def reason_of(mark: Any) -> str | None:
    """Why a test with this mark is skipped; None when it runs."""

    class Case(unittest.TestCase):
        def test(self) -> None:
            pass

    Case.test = mark(Case.test)  # type: ignore[method-assign]
    result = unittest.TestResult()
    Case("test").run(result)
    assert result.testsRun == 1
    assert not result.errors
    return result.skipped[0][1] if result.skipped else None


@pytest.mark.parametrize("name", MARKS)
def test_every_mark_can_be_used(name: str) -> None:
    reason = reason_of(getattr(testing, name))
    assert reason is None or reason.startswith("it ")
    assert getattr(testing, name).__name__ == name


@pytest.mark.parametrize("installed", [True, False])
def test_marks_of_packages_ask_for_them(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "available", lambda self: installed)
    assert (reason_of(testing.require_wandb) is None) is installed
    assert (reason_of(testing.require_transformers) is None) is installed
    assert (reason_of(testing.require_huggingface_suite) is None) is installed


@pytest.mark.parametrize(
    ("count", "runs"),
    [
        (1, {"require_cuda", "require_single_gpu", "require_single_device", "require_non_cpu"}),
        (2, {"require_cuda", "require_multi_gpu", "require_multi_device", "require_non_cpu"}),
    ],
)
def test_marks_of_hardware(count: int, runs: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "detect", lambda: CUDA)
    monkeypatch.setattr(type(CUDA), "count", lambda self: count)
    asked = {"require_cpu", "require_cuda", "require_non_cpu", "require_xpu", "require_multi_xpu"}
    asked |= {"require_single_gpu", "require_multi_gpu", "require_single_device", "require_multi_device"}
    assert {name for name in asked if reason_of(getattr(testing, name)) is None} == runs


def test_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "detect", lambda: CPU)
    assert reason_of(testing.require_cpu) is None
    assert reason_of(testing.require_non_cpu) == "it needs an accelerator"
    assert reason_of(testing.require_single_device) is not None
    name, count, memory = testing.get_backend()
    assert (name, count, memory()) == ("cpu", 1, 0)


def test_slow_tests_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = requirements.slow
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert reason_of(fresh) == "it is slow; RUN_SLOW=1 runs it"
    monkeypatch.setenv("RUN_SLOW", "1")
    assert reason_of(fresh) is None
    assert reason_of(testing.skip) == "it is left out"


def test_versions_of_torch() -> None:
    assert reason_of(testing.require_torch_min_version(version="99.0")) == "it needs torch 99.0"
    assert reason_of(testing.require_torch_min_version(version="2.0")) is None


def test_a_test_that_runs_first_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.packages, "is_pytest_available", lambda: False)
    assert testing.run_first(reason_of) is reason_of
