"""The base classes of experiment trackers, and the forms of values that they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np
import torch

from accelerate.base import PACKAGES, require
from accelerate.state import PartialState

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
    """Base of all trackers; itself a tracker that keeps nothing.

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
        _blank: Whether this is the base class on its own, which stands in where no tracker runs.

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
        """Keep what the run was configured with.

        Args:
            values: Hyperparameters by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one moment.

        Args:
            values: Numbers, texts or dictionaries of numbers by name.
            step: The training step they belong to.
            **kwargs: Arguments of the tracker's library.
        """

    def finish(self) -> None:
        """End the run."""


class LibraryTracker(GeneralTracker):
    """A tracker that keeps values through a library.

    Attributes:
        package: The name that the library is imported by: a row of `PACKAGES`.
        attribute: The name of the attribute that holds the library's run.
    """

    package: str
    attribute: str = "run"

    def __init__(self) -> None:
        super().__init__()
        setattr(self, self.attribute, Silence())

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
        require(self.package, type(self).__name__)
        setattr(self, self.attribute, self._open(import_module(self.package)))

    def _open(self, library: Any) -> Any:
        """Return the run: an object of the imported library."""
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
    """Return numbers as Python has them, inside of dictionaries too.

    Args:
        value: Tensors and arrays of one element, and numpy's numbers, become numbers; anything else is kept.
    """
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.item() if _elements(value) == 1 else value
    return value.item() if isinstance(value, np.generic) else value


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return values without nested dictionaries: `{"a": {"b": 1}}` becomes `{"a/b": 1}`.

    Args:
        values: By name; numbers are made plain.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{inner}": each for inner, each in flatten(value).items()})
        else:
            flat[name] = plain(value)
    return flat


def _elements(value: Any) -> int:
    return int(value.numel()) if isinstance(value, torch.Tensor) else int(value.size)
