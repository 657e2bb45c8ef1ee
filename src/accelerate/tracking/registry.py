"""Registry of trackers by name, and selection of those that are installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from accelerate.base import PACKAGES, LoggerType, plain_value, wrong_value
from accelerate.tracking import runs
from accelerate.tracking.base import GeneralTracker, LibraryTracker
from accelerate.tracking.mlflow import MLflowTracker
from accelerate.tracking.report import ReportTracker

TrackerClass = TypeVar("TrackerClass", bound=type[GeneralTracker])
TrackerChoice = str | LoggerType | GeneralTracker
"""Selection of a tracker by a member, its value, the name of a registered class, or a tracker object."""

TRACKERS: tuple[type[LibraryTracker], ...] = (
    runs.TensorBoardTracker,
    runs.WandBTracker,
    runs.TrackioTracker,
    runs.CometMLTracker,
    runs.AimTracker,
    MLflowTracker,
    runs.ClearMLTracker,
    runs.DVCLiveTracker,
    runs.SwanLabTracker,
)
"""Trackers of `log_with="all"`, if their libraries are installed."""

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    **{tracker.name: tracker for tracker in TRACKERS},
    ReportTracker.name: ReportTracker,  # needs no library, so it is not part of "all"
}
"""All trackers by name, including those that users register."""


def register_tracker_class(tracker_class: TrackerClass) -> TrackerClass:
    """Registers a tracker class for `log_with`, also as a decorator.

    Args:
        tracker_class: A subclass of `GeneralTracker` with a `name` and `requires_logging_directory`. It
            replaces another class of that name with a warning.

    Returns:
        The same class.

    Raises:
        ConfigurationError: It is not such a class.
    """
    if problem := _problem_of(tracker_class):
        fix = "Derive a class from GeneralTracker, with a text `name` and a bool `requires_logging_directory`"
        raise wrong_value("tracker_class", tracker_class, problem, fix)
    name = str(tracker_class.name)
    if LOGGER_TYPE_TO_CLASS.get(name, tracker_class) is not tracker_class:
        warnings.warn(
            f"A tracker with the name {name!r} is already registered: {tracker_class} replaces "
            f"{LOGGER_TYPE_TO_CLASS[name]}.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class
    return tracker_class


def _problem_of(tracker_class: object) -> str | None:
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        return "it is not a subclass of GeneralTracker"
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        return "it has no name"
    if getattr(tracker_class, "requires_logging_directory", None) is None:
        return "requires_logging_directory, whether it needs a folder, is not set"
    return None


def get_available_trackers() -> list[LoggerType]:
    """Returns the trackers of this package whose libraries are installed."""
    return [LoggerType(tracker.name) for tracker in TRACKERS if tracker.available()]


def filter_trackers(
    log_with: TrackerChoice | Iterable[TrackerChoice] | None, logging_dir: str | None = None
) -> list[TrackerChoice]:
    """Returns the trackers of a run without duplicates, in the order of `log_with`.

    Args:
        log_with: Names, members of `LoggerType`, or tracker objects. "all" is every installed tracker.
        logging_dir: Folder of trackers that write files.

    Returns:
        Names and tracker objects. A tracker whose library is missing is dropped with a warning.

    Raises:
        ConfigurationError: A name is unknown, or a tracker that needs a folder has none.
    """
    chosen: list[TrackerChoice] = []
    for entry in _expand(log_with):
        if entry not in chosen and (isinstance(entry, GeneralTracker) or _is_usable(entry, logging_dir)):
            chosen.append(entry)
    return chosen


def build_tracker(
    entry: TrackerChoice, project_name: str, logging_dir: str | None, init_kwargs: dict[str, dict[str, Any]]
) -> GeneralTracker:
    """Returns the tracker of one entry of `filter_trackers` without starting it.

    A tracker object is returned unchanged. Others receive `init_kwargs` of their name.
    """
    if isinstance(entry, GeneralTracker):
        return entry
    kind = LOGGER_TYPE_TO_CLASS[str(entry)]
    build: Callable[..., GeneralTracker] = kind
    folder = (logging_dir,) if kind.requires_logging_directory else ()
    tracker = build(project_name, *folder, **init_kwargs.get(str(entry), {}))
    if kind in TRACKERS:
        tracker.main_process_only = True  # one record per run, while tracker objects may log on each rank
    return tracker


def _expand(log_with: TrackerChoice | Iterable[TrackerChoice] | None) -> list[TrackerChoice]:
    if log_with is None:
        return []
    is_several = isinstance(log_with, Iterable) and not isinstance(log_with, TrackerChoice)
    entries: list[Any] = list(log_with) if is_several else [log_with]  # type: ignore[arg-type]
    choices: list[TrackerChoice] = []
    for entry in (plain_value(entry) for entry in entries):
        choices += get_available_trackers() if entry == "all" else [_resolve(entry)]
    return choices


def _resolve(entry: TrackerChoice) -> TrackerChoice:
    if isinstance(entry, GeneralTracker):
        return entry
    if entry not in LOGGER_TYPE_TO_CLASS:
        fix = (
            f"Choose among {', '.join(LOGGER_TYPE_TO_CLASS)}, pass a GeneralTracker of your own, or register "
            "its class with register_tracker_class"
        )
        raise wrong_value("log_with", entry, "there is no such tracker", fix)
    return LoggerType(entry) if entry in LoggerType else entry


def missing_package(name: str) -> str | None:
    """Returns the package that a tracker of this package needs and that is not installed, or None."""
    library = next((tracker for tracker in TRACKERS if tracker.name == name), None)
    if library is None or LOGGER_TYPE_TO_CLASS.get(name) is not library or library.available():
        return None
    return PACKAGES[library.package].distributions[0]


def _is_usable(entry: str | LoggerType, logging_dir: str | None) -> bool:
    kind = LOGGER_TYPE_TO_CLASS[str(entry)]
    if (package := missing_package(str(entry))) is not None:
        warnings.warn(
            f"log_with={str(entry)!r} has no effect: {package} is not installed. "
            f"Run `pip install {package}`.",
            stacklevel=3,
        )
        return False
    if kind.requires_logging_directory and logging_dir is None:
        fix = "Pass project_dir, or ProjectConfiguration(logging_dir=...), to Accelerator"
        raise wrong_value("log_with", str(entry), "it needs a folder to write to", fix)
    return True
