"""Trackers of the user's own, and which process they work on."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker, Silence, on_main_process


class Notebook(GeneralTracker):
    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.pages

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> str:
        """Write a page."""
        self.pages.append((values, step, kwargs))
        return "written"


class Everywhere(Notebook):
    main_process_only = False


@pytest.fixture
def _second_of_two(states: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    state = PartialState(cpu=True)
    state._shared_state["process_index"] = 1
    state._shared_state["num_processes"] = 2
    assert not state.is_main_process
    return


@pytest.mark.usefixtures("states")
def test_the_main_process_logs() -> None:
    tracker = Notebook()
    assert tracker.log({"loss": 1}, step=3, color="red") == "written"
    assert tracker.pages == [({"loss": 1}, 3, {"color": "red"})]
    assert Notebook.log.__doc__ == "Write a page."


@pytest.mark.usefixtures("_second_of_two")
def test_other_processes_do_not() -> None:
    tracker = Notebook()
    assert tracker.log({"loss": 1}) is None
    assert tracker.pages == []


@pytest.mark.usefixtures("_second_of_two")
def test_a_tracker_can_work_on_all_processes() -> None:
    tracker = Everywhere()
    tracker.log({"loss": 1})
    assert len(tracker.pages) == 1


def test_what_a_tracker_lacks_is_named() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half lacks requires_logging_directory, tracker"):
        Half()
    with pytest.raises(NotImplementedError, match="name"):
        GeneralTracker()


def test_a_blank_tracker_takes_every_call() -> None:
    tracker = GeneralTracker(_blank=True)
    tracker.start()
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 1}, step=1)
    tracker.finish()


def test_silence_takes_every_call() -> None:
    run = Silence()
    assert run.add_scalar("loss", 1).watch(log=True) is run
    assert isinstance(pickle.loads(pickle.dumps(run)), Silence)
