"""Custom trackers, the processes that they run on, and the values that they receive."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from accelerate.state import PartialState
from accelerate.tracking import (
    GeneralTracker,
    Silence,
    Snapshot,
    flatten,
    on_main_process,
    plain,
    read_snapshot,
    take_snapshot,
)


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


def test_missing_attributes_of_a_tracker_are_named() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half lacks requires_logging_directory, tracker"):
        Half()
    with pytest.raises(NotImplementedError, match="name"):
        GeneralTracker()


def test_silence_takes_every_call() -> None:
    run = Silence()
    assert run.add_scalar("loss", 1).watch(log=True) is run
    assert isinstance(pickle.loads(pickle.dumps(run)), Silence)


@pytest.mark.parametrize("build", [torch.ones, np.ones])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": v}, lambda v: [v], lambda v: ({"b": v},)])
def test_later_changes_do_not_reach_a_copy(build: Any, wrap: Any) -> None:
    value = build(2)
    copy = take_snapshot(wrap(value))
    value += 1
    flat = str(read_snapshot(copy))
    assert "1." in flat
    assert "2." not in flat


def test_a_copy_has_no_graph() -> None:
    assert not take_snapshot(torch.ones(1, requires_grad=True) * 2).requires_grad


def test_a_snapshot_is_waited_for() -> None:
    waits: list[str] = []
    snapshot = Snapshot(torch.ones(1), lambda: waits.append("waited"))
    assert read_snapshot([snapshot])[0].tolist() == [1.0]
    assert waits == ["waited"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.tensor(2.0), 2.0),
        (torch.tensor([3]), 3),
        (np.float64(0.5), 0.5),
        (np.array([4]), 4),
        ({"a": torch.tensor(1)}, {"a": 1}),
        ("text", "text"),
    ],
)
def test_numbers_are_plain(value: Any, wanted: Any) -> None:
    found = plain(value)
    assert found == wanted
    assert type(found) is type(wanted)


def test_dictionaries_are_flat() -> None:
    assert flatten({"a": {"b": torch.tensor(1), "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_tensor_of_a_gpu_is_copied_in_its_own_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        value = torch.zeros(1, device="cuda")
        torch.cuda._sleep(100_000_000)
        value += 1
        copy = take_snapshot(value)
        value += 1
    assert isinstance(copy, Snapshot)
    assert read_snapshot(copy).tolist() == [1.0]
