"""Weights & Biases, Trackio and SwanLab, whose libraries have one interface."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelerate.tracking.base import LibraryTracker, on_main_process, plain


class RunTracker(LibraryTracker):
    """A tracker whose library opens a run with `init`, and whose run has `log` and `finish`.

    Args:
        run_name: Name of the project.
        **kwargs: Further arguments of the library's `init`.
    """

    run: Any
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    def _open(self, library: Any) -> Any:
        return library.init(**{"project": self.run_name, **self.init_kwargs})

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


class _ImageTracker(RunTracker):
    """A run whose library has an `Image`."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of one moment.

        Args:
            values: By name: lists of arrays, or whatever the `Image` of the library takes.
            step: The training step they belong to.
            **kwargs: Arguments of the run's `log`.
        """
        image = import_module(self.package).Image
        shown = {name: [image(each) for each in images] for name, images in values.items()}
        self.run.log(shown, step=step, **kwargs)


class WandBTracker(_ImageTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `wandb.init`.
    """

    name = package = "wandb"

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
        """Keep a table, given by rows or as a data frame.

        Args:
            table_name: What it is called.
            columns: Their names.
            data: Its rows.
            dataframe: A pandas data frame, in place of both.
            step: The training step it belongs to.
            **kwargs: Arguments of the run's `log`.
        """
        table = import_module(self.package).Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)


class TrackioTracker(RunTracker):
    """Logs to Trackio, a tracker that keeps its runs in files of this machine.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `trackio.init`.
    """

    name = package = "trackio"
    requires_logging_directory = False
    main_process_only = False


class SwanLabTracker(_ImageTracker):
    """Logs to SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `swanlab.init`.
    """

    name = package = "swanlab"
