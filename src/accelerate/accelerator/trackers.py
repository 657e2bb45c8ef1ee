"""Experiment trackers of a run.

`Accelerator.init_trackers`, `log`, `get_tracker` and `end_training` delegate to the `Trackers` of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from numbers import Real
from typing import Any

from accelerate import plugins, tracking
from accelerate.base import wrong_value
from accelerate.logging import get_logger
from accelerate.state import Leader, PartialState, services

logger = get_logger(__name__)


def _refuse_unnamed(argument: str, values: object) -> None:
    """Raises an error for values without names, which no tracker logs."""
    if values is None or isinstance(values, (str, bytes, Real, Sequence, Set)):
        fix = 'Pass a dictionary, such as {"loss": 0.5}'
        raise wrong_value(argument, values, "the values have no names", fix, AttributeError)


def _check_arguments(argument: str, by_tracker: object) -> None:
    """Raises an error unless the arguments of trackers are dictionaries by the name of the tracker."""
    fix = 'Pass dictionaries by the name of the tracker, such as {"wandb": {"group": "a"}}'
    if by_tracker is None:
        return
    if not isinstance(by_tracker, Mapping):
        raise wrong_value(argument, by_tracker, "its keys are names of trackers", fix, AttributeError)
    for name, arguments in by_tracker.items():
        if not isinstance(arguments, Mapping):
            raise wrong_value(f"{argument}[{name!r}]", arguments, "it is not a dictionary", fix, TypeError)


class Trackers:
    """Running trackers, with a thread for each tracker that waits for a disk or a server.

    Attributes:
        running: Trackers that are running, none before `start`.
    """

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.senders = tracking.Senders()
        self._waiting: list[Any] = []  # until their replica group has the main process
        self._config: dict[str, Any] | None = None

    def start(
        self,
        kinds: Sequence[Any],
        project_name: str,
        project: plugins.ProjectConfiguration,
        config: dict[str, Any] | None,
        init_kwargs: dict[str, dict[str, Any]] | None,
    ) -> None:
        """Starts one tracker of each kind, and stores the hyperparameters.

        In a run with replica groups, those of the main process start later if another group has it now.
        """
        if config is not None:
            _refuse_unnamed("config", config)
        _check_arguments("init_kwargs", init_kwargs)
        named = {*tracking.LOGGER_TYPE_TO_CLASS, *(getattr(kind, "name", kind) for kind in kinds)}
        if unknown := sorted({*(init_kwargs or ())} - named):
            fix = f"Use names among {', '.join(sorted(map(str, named)))}"
            raise wrong_value("init_kwargs", unknown, "its keys are names of trackers", fix)
        self.running = [
            tracking.build_tracker(kind, project_name, project.logging_dir, init_kwargs or {})
            for kind in kinds
        ]
        self._config = config
        if services.find(Leader) is not None and not PartialState().is_main_process:
            self._waiting = [tracker for tracker in self.running if tracker.main_process_only]
        self._open([tracker for tracker in self.running if tracker not in self._waiting])

    def _open(self, trackers: Sequence[Any]) -> None:
        for tracker in trackers:
            tracker.start()
        for tracker in trackers if self._config is not None else ():
            tracker.store_init_configuration(self._config)

    def _open_waiting(self) -> None:
        """Starts the trackers of the main process, if this process has become it."""
        if self._waiting and PartialState().is_main_process:
            waiting, self._waiting = self._waiting, []
            self._open(waiting)

    def wait(self) -> list[Any]:
        """Waits until all values are sent, and returns the running trackers."""
        self._open_waiting()
        self.senders.wait()
        return self.running

    def find(self, name: str, unwrap: bool) -> Any:
        """Returns a running tracker by its name, or a tracker without effect if none is running."""
        for tracker in self.wait():
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.running:
            if (package := tracking.missing_package(name)) is not None:
                logger.warning_once(
                    f"get_tracker({name!r}) returns a tracker without effect: {package} is not installed. "
                    f"Run `pip install {package}`."
                )
            return tracking.GeneralTracker(_blank=True)
        names = ", ".join(tracker.name for tracker in self.running)
        fix = "Name one of them, or add it to log_with"
        raise wrong_value("name", name, f"the running trackers are {names}", fix)

    def log(
        self, values: dict[str, Any], step: int | None, log_kwargs: dict[str, dict[str, Any]] | None
    ) -> None:
        """Sends values to all running trackers."""
        _refuse_unnamed("values", values)
        if log_kwargs:
            _check_arguments("log_kwargs", log_kwargs)
        self._open_waiting()
        arguments = log_kwargs or {}
        for tracker in self.running:
            if tracker in self._waiting:
                continue
            record = tracking.Record(values, step, arguments.get(tracker.name, {}))
            self.senders.of(tracker).log(record)

    def senders_of_running(self) -> Iterator[Any]:
        """Yields the sender of each running tracker, the last one first."""
        for tracker in reversed(self.running):
            yield self.senders.of(tracker)
