"""Weights & Biases."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelerate.tracking.base import RunTracker, on_main_process


class WandBTracker(RunTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `wandb.init`.
    """

    name = package = "wandb"
    requires_logging_directory = False
    main_process_only = False

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of one moment.

        Args:
            values: By name: lists of arrays, or whatever `wandb.Image` takes.
            step: The training step they belong to.
            **kwargs: Arguments of the run's `log`.
        """
        image = import_module(self.package).Image
        shown = {name: [image(each) for each in images] for name, images in values.items()}
        self.run.log(shown, step=step, **kwargs)

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
