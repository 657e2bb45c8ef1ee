"""Base classes of tests, and checks."""

from __future__ import annotations

import io
import shutil
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from accelerate.ops import gather
from accelerate.state import AcceleratorState, PartialState


class TempDirTestCase(unittest.TestCase):
    """Tests with a folder `tmpdir`, one for the class, which goes away with it.

    Attributes:
        clear_on_setup: Whether the folder is emptied before each test.
    """

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        if not self.clear_on_setup:
            return
        for path in self.tmpdir.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Tests after each of which the states are those of a new program."""

    def tearDown(self) -> None:
        """Forget the states."""
        super().tearDown()
        AcceleratorState._reset_state()
        PartialState._reset_state()


class MockingTestCase(unittest.TestCase):
    """Tests that put something in the place of something else."""

    def add_mocks(self, mocks: Any) -> None:
        """Start replacements that end with the test.

        Args:
            mocks: What `unittest.mock.patch` returned, one or several.
        """
        self.mocks = list(mocks) if isinstance(mocks, list | tuple) else [mocks]
        for each in self.mocks:
            each.start()
            self.addCleanup(each.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether all processes have the same values; call it on all ranks.

    Args:
        tensor: The values of this process.
    """
    values = gather(tensor[None].clone().to(PartialState().device)).cpu()
    return all(torch.equal(each, tensor.cpu()) for each in values)


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Fail unless the block raises.

    Args:
        exception_class: What it raises.
        msg: A part of the text; None: any text.

    Raises:
        AssertionError: Nothing was raised, something else, or with another text.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(f"{exception_class.__name__} was expected, and got {error!r}") from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"{msg!r} was expected in the text, and got {str(error)!r}") from error
    else:
        raise AssertionError(f"{exception_class.__name__} was expected, and nothing was raised")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return what a function prints.

    Args:
        func: The function.
        *args: Its arguments.
        **kwargs: Its arguments by name.
    """
    with redirect_stdout(io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()
