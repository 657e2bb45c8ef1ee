"""Comet."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from accelerate.tracking.base import LibraryTracker, on_main_process, plain

logger = get_logger(__name__)


class CometMLTracker(LibraryTracker):
    """Logs to Comet.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `comet_ml.start`, such as `online=False`.
    """

    name = package = "comet_ml"
    attribute = "writer"
    writer: Any
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    def _open(self, library: Any) -> Any:
        return library.start(**{"project_name": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep what the experiment was configured with.

        Args:
            values: Hyperparameters by name.
        """
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one moment.

        Args:
            values: By name: numbers (tensors of one element too), texts, or dictionaries of numbers, whose
                own names are taken; others are left out with a warning.
            step: The training step they belong to.
            **kwargs: Arguments of `log_metric`, `log_other` or `log_metrics`.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in plain(values).items():
            if isinstance(value, int | float):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                logger.warning_once(
                    f"Comet leaves out {name!r}: a {type(value).__name__} is no number, text or dict"
                )

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()
