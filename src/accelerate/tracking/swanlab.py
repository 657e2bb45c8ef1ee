"""SwanLab."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelerate.tracking.base import RunTracker, on_main_process


class SwanLabTracker(RunTracker):
    """Logs to SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `swanlab.init`.
    """

    name = package = "swanlab"
    requires_logging_directory = False
    main_process_only = False

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of one moment.

        Args:
            values: By name: lists of arrays, or whatever `swanlab.Image` takes.
            step: The training step they belong to.
            **kwargs: Arguments of the run's `log`.
        """
        image = import_module(self.package).Image
        shown = {name: [image(each) for each in images] for name, images in values.items()}
        self.run.log(shown, step=step, **kwargs)
