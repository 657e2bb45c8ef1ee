"""Marks skip where their need is not met, and only there; base classes, run as tests; launch commands."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from accelerate import test_utils
from accelerate.base import Package
from accelerate.devices import CPU, CUDA
from accelerate.state import PartialState
from accelerate.test_utils import testing
from accelerate.test_utils.testing import (
    DEFAULT_LAUNCH_COMMAND,
    AccelerateTestCase,
    MockingTestCase,
    TempDirTestCase,
    are_the_same_tensors,
    assert_exception,
    capture_call_output,
    device_count,
    get_launch_command,
    get_torch_dist_unique_port,
    memory_allocated_func,
    pytest_xdist_worker_id,
    torch_device,
)

MARKS = sorted(name for name in test_utils.__all__ if name.startswith("require_") and "version" not in name)


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
def test_marks_of_packages_skip_without_them(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(testing, "detect", lambda: CUDA)
    monkeypatch.setattr(type(CUDA), "count", lambda self: count)
    asked = {"require_cpu", "require_cuda", "require_non_cpu", "require_xpu", "require_multi_xpu"}
    asked |= {"require_single_gpu", "require_multi_gpu", "require_single_device", "require_multi_device"}
    assert {name for name in asked if reason_of(getattr(testing, name)) is None} == runs


def test_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "detect", lambda: CPU)
    assert reason_of(testing.require_cpu) is None
    assert reason_of(testing.require_non_cpu) == "it needs an accelerator"
    assert reason_of(testing.require_single_device) is not None
    name, count, memory = testing.get_backend()
    assert (name, count, memory()) == ("cpu", 1, 0)


def test_slow_tests_run_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = testing.slow
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert reason_of(fresh) == "it is slow; RUN_SLOW=1 runs it"
    monkeypatch.setenv("RUN_SLOW", "1")
    assert reason_of(fresh) is None
    assert reason_of(testing.skip) == "it is left out"


def test_versions_of_torch() -> None:
    assert reason_of(testing.require_torch_min_version(version="99.0")) == "it needs torch 99.0"
    assert reason_of(testing.require_torch_min_version(version="2.0")) is None


def test_a_test_that_runs_first_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing.packages, "is_pytest_available", lambda: False)
    assert testing.run_first(reason_of) is reason_of


def run(*classes: type[unittest.TestCase]) -> unittest.TestResult:
    loader, result = unittest.defaultTestLoader, unittest.TestResult()
    unittest.TestSuite(loader.loadTestsFromTestCase(each) for each in classes).run(result)
    assert result.wasSuccessful(), [*result.errors, *result.failures]
    return result


def test_a_folder_is_emptied_before_each_test_and_removed_after_the_last() -> None:
    seen: list[Path] = []

    class Case(TempDirTestCase):
        def write(self) -> None:
            assert list(self.tmpdir.iterdir()) == []
            (self.tmpdir / "inner").mkdir()
            (self.tmpdir / "file").write_text("x")
            seen.append(self.tmpdir)

        test_1 = test_2 = write

    assert run(Case).testsRun == 2
    assert seen[0] == seen[1]
    assert not seen[0].exists()


def test_a_folder_can_be_kept() -> None:
    counts: list[int] = []

    class Case(TempDirTestCase):
        clear_on_setup = False

        def write(self) -> None:
            counts.append(len(list(self.tmpdir.iterdir())))
            (self.tmpdir / str(len(counts))).write_text("x")

        test_1 = test_2 = write

    run(Case)
    assert counts == [0, 1]


def test_states_are_reset_after_each_test() -> None:
    class Case(AccelerateTestCase):
        def test(self) -> None:
            PartialState(cpu=True)

    run(Case)
    assert PartialState._shared_state == {}


def test_replacements_end_with_the_test() -> None:
    before = Path.home

    class Case(MockingTestCase):
        def test_one(self) -> None:
            self.add_mocks(mock.patch.object(Path, "home", return_value="here"))
            assert Path.home() == "here"

        def test_two(self) -> None:
            self.add_mocks([mock.patch.object(Path, "home", return_value="there")])
            assert Path.home() == "there"

    run(Case)
    assert Path.home == before


@pytest.mark.usefixtures("states")
def test_one_process_has_the_same_tensors() -> None:
    PartialState(cpu=True)
    assert are_the_same_tensors(torch.arange(3))


def nothing() -> None:
    return


def wrong() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("work", "expected", "text", "complaint"),
    [
        (wrong, ValueError, "boom", None),
        (wrong, ValueError, None, None),
        (wrong, ValueError, "other", "'other' was expected in the text, and got 'boom'"),
        (wrong, KeyError, None, "KeyError was expected, and got ValueError"),
        (nothing, ValueError, None, "ValueError was expected, and nothing was raised"),
    ],
)
def test_expected_exceptions(
    work: Callable[[], None], expected: Any, text: str | None, complaint: str | None
) -> None:
    def check() -> None:
        with assert_exception(expected, text):
            work()

    if complaint is None:
        check()
    else:
        with pytest.raises(AssertionError, match=complaint.replace("(", r"\(")):
            check()


def test_capture_call_output_returns_the_output() -> None:
    assert capture_call_output(print, "a", "b", sep="-") == "a-b\n"


def test_arguments_become_flags_of_the_launch_command() -> None:
    words = get_launch_command(num_processes=2, multi_gpu=True, config_file=None, debug=False)
    assert words == ["accelerate", "launch", "--num_processes=2", "--multi_gpu"]
    assert get_launch_command(num_processes=device_count, monitor_interval=0.1) == DEFAULT_LAUNCH_COMMAND


def test_device_facts_of_this_machine_are_read() -> None:
    assert device_count >= 1
    assert isinstance(torch_device, str)
    assert memory_allocated_func() >= 0


@pytest.mark.parametrize(("worker", "number"), [("gw0", 0), ("gw3", 3), (None, 0)])
def test_workers_have_ports_of_their_own(
    worker: str | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    assert pytest_xdist_worker_id() == number
    assert get_torch_dist_unique_port() == 29500 + number
