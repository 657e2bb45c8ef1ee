"""Base classes of experiment trackers, and conversion of logged values."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import torch

from accelerate.base import PACKAGES, require
from accelerate.logging import get_logger
from accelerate.state import PartialState

logger = get_logger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])
Columns = list[str] | None
Rows = list[list[Any]] | None

REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: Method) -> Method:
    """Wraps a method of a tracker so that it runs on rank 0 only, if its `main_process_only` is set.

    Args:
        function: The method, whose calls return None on other ranks.
    """

    @wraps(function)
    def execute_on_main_process(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return cast(Method, execute_on_main_process)


class GeneralTracker:
    """Base class of all trackers, which itself logs nothing.

    A custom tracker derives from it, sets `name` and `requires_logging_directory`, and has a property
    `tracker` with the run object of its library. These methods are called on all ranks.

    1. The constructor, which stores the arguments and starts nothing.

    2. `start`, which starts the run.

    3. `store_init_configuration`, at most once.

    4. `log`, any number of times.

    5. `finish`.

    Attributes:
        main_process_only: Whether methods wrapped by `on_main_process` run on rank 0 only.
        blocks: Whether `log` may block, because it waits for a disk or a server. `Accelerator.log` then
            passes the values to a thread, which calls `log` in order.

    Args:
        _blank: Whether this is the base class itself, which replaces a tracker on ranks without one.

    Raises:
        NotImplementedError: A subclass lacks a required attribute.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    blocks: bool = False

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in REQUIRED if not hasattr(type(self), name) and name not in vars(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}: define `name` (text), "
                "`requires_logging_directory` (bool) and the property `tracker` in the class."
            )

    def start(self) -> None:
        """Starts the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the configuration of the run.

        Args:
            values: Hyperparameters by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values.

        Args:
            values: Numbers, strings or dictionaries of numbers by name; tensors of one element are numbers.
            step: Training step of the values.
            **kwargs: Arguments for the library of the tracker.
        """

    def finish(self) -> None:
        """Ends the run."""


class LibraryTracker(GeneralTracker):
    """Base class of trackers that log through a library."""

    package: str  # import name of the library, a key of `PACKAGES`
    attribute: str = "run"  # name of the attribute with the run object of the library
    title: str  # name of the library in messages
    accepts: str = "number or text"  # types that `log` accepts, while others cause a warning
    configures_by: str  # name of the method of the run that stores its configuration
    ends_by: str = "finish"  # name of the method of the run that ends it
    requires_logging_directory = False

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        setattr(self, self.attribute, Silence())
        self.run_name = run_name
        self.init_kwargs = kwargs

    @classmethod
    def available(cls) -> bool:
        """Returns whether the library is installed."""
        return PACKAGES[cls.package].available()

    @property
    def tracker(self) -> Any:
        """Run object of the library, or an object whose calls do nothing on ranks that do not log."""
        return getattr(self, self.attribute)

    @on_main_process
    def start(self) -> None:
        """Starts a run or continues one.

        Raises:
            MissingPackageError: The library is not installed.
        """
        setattr(self, self.attribute, self._open(self._import()))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        getattr(self.tracker, self.configures_by)(values)

    def finish(self) -> None:
        """Ends the run, also if another replica group has the main process now."""
        getattr(self.tracker, self.ends_by)()

    def _import(self) -> Any:
        require(self.package, type(self).__name__)
        return import_module(self.package)

    def _open(self, library: ModuleType) -> Any:
        """Returns the run object of the imported library."""
        raise NotImplementedError

    def _warn_left_out(self, name: str, value: object) -> None:
        logger.warning_once(
            f"{self.title} does not log {name!r}: a {type(value).__name__} is not a {self.accepts}"
        )


class TableTracker(LibraryTracker):
    """Base class of trackers that log tables."""

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Columns = None,
        data: Rows = None,
        dataframe: object = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs a table from rows or from a data frame.

        Args:
            table_name: Name of the table.
            columns: Names of the columns.
            data: Rows of the table.
            dataframe: A pandas data frame, instead of both.
            step: Training step of the table.
            **kwargs: Arguments for the method of the library, which is `log` of wandb or `report_table` of
                ClearML.

        Raises:
            ConfigurationError: ClearML gets neither rows nor a data frame.
        """
        self._log_table(table_name, columns, data, dataframe, step, **kwargs)

    def _log_table(
        self, name: str, columns: Columns, data: Rows, dataframe: object, step: int | None, **kwargs: Any
    ) -> None:
        raise NotImplementedError


class Silence:
    """Run object on ranks that do not log, whose calls do nothing."""

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):  # copying and pickling look up optional methods
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        return self


def plain(value: object) -> Any:
    """Converts tensors, arrays and numpy numbers of one element to Python numbers, also in dictionaries."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 else value
    return value


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Flattens nested dictionaries, whose keys are joined by a slash, and returns plain values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{inner}": item for inner, item in flatten(value).items()})
        else:
            flat[name] = plain(value)
    return flat
