"""Which trackers a run uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import PACKAGES, ConfigurationError, LoggerType, Package
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    TRACKERS,
    GeneralTracker,
    TensorBoardTracker,
    build_tracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)


class Notebook(GeneralTracker):
    name = "notebook"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.kwargs = run_name, kwargs

    @property
    def tracker(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _registered_for_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def install(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Let TensorBoard look installed or missing, and the others missing."""
    board = TensorBoardTracker if available else None
    for tracker in TRACKERS:
        monkeypatch.setattr(tracker, "available", lambda found=tracker is board: found)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, available=True)


@pytest.fixture
def _missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, available=False)


def test_every_row_is_a_named_tracker() -> None:
    for tracker in TRACKERS:
        assert tracker.name in LoggerType
        assert isinstance(tracker.requires_logging_directory, bool)
        assert hasattr(tracker, "tracker")
        assert LOGGER_TYPE_TO_CLASS[tracker.name] is tracker
    assert {"all", *LOGGER_TYPE_TO_CLASS} == {*LoggerType.list(), "report"}


def test_a_tracker_is_installed_when_its_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for tracker in TRACKERS:
        for package in PACKAGES:
            monkeypatch.setattr(Package, "available", lambda self, package=package: self.module == package)
            others = {"tensorboardX"} if tracker is TensorBoardTracker else set()
            assert tracker.available() == (package in {tracker.package, *others})


def test_the_guide_lists_the_package_of_every_tracker() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "tracking.md").read_text()
    for tracker in TRACKERS:
        assert f"| `{tracker.name}` | `{PACKAGES[tracker.package].distributions[0]}`" in guide


def test_no_tracker_is_requested() -> None:
    assert filter_trackers(None) == []
    assert filter_trackers([]) == []


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "log_with",
    ["tensorboard", LoggerType.TENSORBOARD, ["tensorboard", LoggerType.TENSORBOARD], "all", ["all"]],
)
def test_a_tracker_named_twice_is_used_once(log_with: Any) -> None:
    assert filter_trackers(log_with, "logs") == [LoggerType.TENSORBOARD]


@pytest.mark.usefixtures("_installed")
def test_custom_trackers_are_kept() -> None:
    mine = Notebook()
    assert filter_trackers(mine) == [mine]
    assert filter_trackers([mine, mine, "tensorboard"], "logs") == [mine, LoggerType.TENSORBOARD]
    assert filter_trackers([mine, "all"], "logs") == [mine, LoggerType.TENSORBOARD]
    assert filter_trackers(["all", "report", mine], "logs") == [LoggerType.TENSORBOARD, "report", mine]


@pytest.mark.usefixtures("_missing")
def test_a_tracker_without_its_library_is_omitted_with_a_warning() -> None:
    assert get_available_trackers() == []
    with pytest.warns(UserWarning, match="tensorboard is not installed"):
        assert filter_trackers("tensorboard", "logs") == []
    assert filter_trackers("all", "logs") == []


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("log_with", ["tensorboard", "all"])
def test_a_missing_folder_is_an_error(log_with: str) -> None:
    with pytest.raises(ConfigurationError, match=r"log_with='tensorboard': .*project_dir"):
        filter_trackers(log_with)


@pytest.mark.parametrize("log_with", ["paper", ["tensorboard", "paper"]])
def test_an_unknown_name_is_an_error_that_names_the_others(log_with: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"log_with='paper': .*Choose among tensorboard"):
        filter_trackers(log_with, "logs")


def test_a_registered_class_can_be_named() -> None:
    assert register_tracker_class(Notebook) is Notebook
    assert filter_trackers("notebook") == ["notebook"]
    tracker = build_tracker("notebook", "run", None, {"notebook": {"color": "red"}})
    assert isinstance(tracker, Notebook)
    assert (tracker.run_name, tracker.kwargs) == ("run", {"color": "red"})


@pytest.mark.usefixtures("_missing")
def test_a_registered_class_takes_the_place_of_ours() -> None:
    class Board(Notebook):
        name = "tensorboard"

    with pytest.warns(UserWarning, match="'tensorboard' is already registered: .*Board'> replaces .*Tens"):
        register_tracker_class(Board)
    assert register_tracker_class(Board) is Board  # the same class replaces nothing
    assert filter_trackers("tensorboard") == [LoggerType.TENSORBOARD]
    assert isinstance(build_tracker(LoggerType.TENSORBOARD, "run", None, {}), Board)


class Nameless(Notebook):
    name = ""


class Folderless(GeneralTracker):
    name = "folderless"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Notebook(), "not a subclass of GeneralTracker"),
        (dict, "not a subclass of GeneralTracker"),
        (GeneralTracker, "it has no name"),
        (Nameless, "it has no name"),
        (Folderless, "requires_logging_directory"),
    ],
)
def test_only_complete_trackers_can_be_registered(wrong: Any, why: str) -> None:
    before = dict(LOGGER_TYPE_TO_CLASS)
    with pytest.raises(ConfigurationError, match=f"tracker_class=.*{why}"):
        register_tracker_class(wrong)
    assert before == LOGGER_TYPE_TO_CLASS


def test_a_tracker_that_writes_files_gets_the_folder() -> None:
    tracker = build_tracker("tensorboard", "run", "logs", {"tensorboard": {"flush_secs": 5}})
    assert isinstance(tracker, TensorBoardTracker)
    assert (tracker.run_name, tracker.logging_dir_param) == ("run", "logs")
    assert tracker.init_kwargs == {"flush_secs": 5}


def test_a_tracker_object_is_used_unchanged() -> None:
    mine = Notebook()
    assert build_tracker(mine, "run", None, {}) is mine
