"""One progress bar for a machine, and rich tracebacks on request."""

from __future__ import annotations

import io
import sys

import pytest

from accelerate import display
from accelerate.base import ConfigurationError, MissingPackageError
from accelerate.state import PartialState

pytestmark = pytest.mark.usefixtures("states")


def bar_of(local_rank: int, **arguments: object) -> str:
    PartialState(cpu=True)
    PartialState._shared_state.update(local_process_index=local_rank)
    screen = io.StringIO()
    assert list(display.tqdm(range(3), file=screen, **arguments)) == [0, 1, 2]
    return screen.getvalue()


def test_only_the_first_process_of_a_machine_shows_it() -> None:
    assert "3/3" in bar_of(0)
    assert bar_of(1) == ""
    assert "3/3" in bar_of(1, main_process_only=False)
    assert bar_of(0, disable=True) == ""
    assert bar_of(0, main_process_only=False, disable=True) == ""


def test_a_bar_without_an_iterable() -> None:
    PartialState(cpu=True)
    screen = io.StringIO()
    with display.tqdm(total=2, desc="steps", file=screen) as bar:
        bar.update(2)
    assert "steps: 100%" in screen.getvalue()


@pytest.mark.parametrize("first", [True, False])
def test_the_first_argument_is_what_to_iterate(first: bool) -> None:
    with pytest.raises(ConfigurationError, match=f"Write main_process_only={first}"):
        display.tqdm(first, range(3))


def test_tqdm_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str, feature: str) -> None:
        raise MissingPackageError(f"{feature} needs {package}")

    monkeypatch.setattr(display, "require", missing)
    with pytest.raises(MissingPackageError, match="A progress bar needs tqdm"):
        display.tqdm(range(3))


def test_rich_tracebacks_are_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    assert not display.install_rich_tracebacks()
    assert sys.excepthook is before
    monkeypatch.setattr(sys, "excepthook", before)  # so that it is put back
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "true")
    assert display.install_rich_tracebacks()
    assert sys.excepthook is not before
