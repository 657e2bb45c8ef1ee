"""What every experiment tracker is and does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

from accelerate.base import require
from accelerate.state import PartialState
from accelerate.tracking.values import plain

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


class RunTracker(GeneralTracker):
    """A tracker whose library opens a run with `init`, and whose run has `log` and `finish`.

    Attributes:
        package: The name that the library is imported by.

    Args:
        run_name: Name of the project.
        **kwargs: Further arguments of the library's `init`.
    """

    package: str

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = Silence()

    @property
    def tracker(self) -> Any:
        """The run; on processes that do not log, an object whose calls do nothing."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Open the run.

        Raises:
            MissingPackageError: The library is not installed.
        """
        require(self.package, type(self).__name__)
        self.run = import_module(self.package).init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep what the run was configured with.

        Args:
            values: Hyperparameters by name.
        """
        import_module(self.package).config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one moment.

        Args:
            values: By name: what the library takes; tensors of one element are made numbers.
            step: The training step they belong to.
            **kwargs: Arguments of the run's `log`.
        """
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()


class Silence:
    """Stands in for a library's run object on processes that do not log: every call does nothing."""

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):  # copying and pickling ask for methods that an object need not have
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        return self
