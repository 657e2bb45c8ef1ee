"""The base classes of experiment trackers, and the forms of values that they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np
import torch

from accelerate.base import PACKAGES, require
from accelerate.logging import get_logger
from accelerate.state import PartialState

logger = get_logger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: Method) -> Method:
    """Make a tracker's method do its work on the first process only, if its `main_process_only` says so.

    Args:
        function: The method; on the other processes its call returns None.
    """

    @wraps(function)
    def execute_on_main_process(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return cast(Method, execute_on_main_process)


class GeneralTracker:
    """Base of all trackers; itself a tracker that logs nothing.

    A tracker of your own derives from it, sets `name` and `requires_logging_directory`, and has a property
    `tracker` with the run object of its library. It gets these calls, each on all ranks:

    1. the constructor: keep the arguments, start nothing;
    2. `start`: begin the run;
    3. `store_init_configuration`: at most once;
    4. `log`: any number of times;
    5. `finish`.

    Attributes:
        main_process_only: Whether methods under `on_main_process` work on the first process only.
        blocks: Whether `log` may take long: it waits for a disk or a server. `Accelerator.log` then hands the
            values to a thread, which calls `log`, in order.

    Args:
        _blank: Whether this is the base class itself, which is used where no tracker runs.

    Raises:
        NotImplementedError: A subclass lacks something that it must have.
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
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store what the run was configured with.

        Args:
            values: Hyperparameters by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values.

        Args:
            values: Numbers, strings or dictionaries of numbers by name; tensors of one element are numbers.
            step: The training step they belong to.
            **kwargs: Arguments of the tracker's library.
        """

    def finish(self) -> None:
        """End the run."""


class LibraryTracker(GeneralTracker):
    """A tracker that logs through a library."""

    package: str  # the name that the library is imported by: a row of `PACKAGES`
    attribute: str = "run"  # the name of the attribute that holds the library's run
    title: str  # the library in messages
    accepts: str = "number or text"  # what `log` sends to the library; it leaves out others with a warning
    configures_by: str  # the name of the run's method that stores what it was configured with
    ends_by: str = "finish"  # the name of the run's method that ends it
    requires_logging_directory = False

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        setattr(self, self.attribute, Silence())
        self.run_name = run_name
        self.init_kwargs = kwargs

    @classmethod
    def available(cls) -> bool:
        """Return whether the library is installed."""
        return PACKAGES[cls.package].available()

    @property
    def tracker(self) -> Any:
        """The run of the library; on processes that do not log, an object whose calls do nothing."""
        return getattr(self, self.attribute)

    @on_main_process
    def start(self) -> None:
        """Begin the run, or continue one.

        Raises:
            MissingPackageError: The library is not installed.
        """
        setattr(self, self.attribute, self._open(self._import()))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        getattr(self.tracker, self.configures_by)(values)

    @on_main_process
    def finish(self) -> None:
        getattr(self.tracker, self.ends_by)()

    def _import(self) -> Any:
        require(self.package, type(self).__name__)
        return import_module(self.package)

    def _open(self, library: Any) -> Any:
        """Return the run: an object of the imported library."""
        raise NotImplementedError

    def _warn_left_out(self, name: str, value: object) -> None:
        logger.warning_once(
            f"{self.title} leaves out {name!r}: a {type(value).__name__} is no {self.accepts}"
        )


class TableTracker(LibraryTracker):
    """A tracker that logs tables."""

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given by rows or as a data frame.

        Args:
            table_name: Its name.
            columns: Names of the columns.
            data: Its rows.
            dataframe: A pandas data frame, in place of both.
            step: The training step it belongs to.
            **kwargs: Arguments of the call of the library: `log` of wandb's run, `report_table` of ClearML.

        Raises:
            ConfigurationError: ClearML gets neither rows nor a data frame.
        """
        self._log_table(table_name, columns, data, dataframe, step, kwargs)

    def _log_table(
        self, name: str, columns: Any, data: Any, dataframe: Any, step: int | None, kwargs: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Silence:
    """The run object on processes that do not log: every call does nothing."""

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):  # copying and pickling ask for methods that an object need not have
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        return self


def plain(value: Any) -> Any:
    """Return tensors, arrays and numpy's numbers of one element as Python numbers, in dictionaries too."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 else value
    return value


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return plain values without nested dictionaries: `{"a": {"b": 1}}` becomes `{"a/b": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{inner}": item for inner, item in flatten(value).items()})
        else:
            flat[name] = plain(value)
    return flat
