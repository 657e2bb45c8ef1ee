"""Base classes of tests, run as tests."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from accelerate.state import PartialState
from accelerate.test_utils.testing import (
    AccelerateTestCase,
    MockingTestCase,
    TempDirTestCase,
    are_the_same_tensors,
    assert_exception,
    capture_call_output,
)


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


def test_states_are_forgotten() -> None:
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


def test_what_a_function_prints() -> None:
    assert capture_call_output(print, "a", "b", sep="-") == "a-b\n"
