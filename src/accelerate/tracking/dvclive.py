"""DVCLive."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelerate.logging import get_logger
from accelerate.tracking.base import LibraryTracker, Silence, flatten, on_main_process

logger = get_logger(__name__)


class DVCLiveTracker(LibraryTracker):
    """Logs to the files of DVCLive.

    Args:
        run_name: Not used: DVC names its experiments.
        live: A `dvclive.Live` of one's own; None: a new one.
        **kwargs: Arguments of `dvclive.Live`.
    """

    name = package = "dvclive"
    attribute = "live"
    requires_logging_directory = False
    blocks = True

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live = live
        self.init_kwargs = kwargs

    def _open(self, library: Any) -> Any:
        return library.Live(**self.init_kwargs) if self.live is None else self.live

    @property
    def tracker(self) -> Any:
        """The `Live`; on processes that do not log, an object whose calls do nothing."""
        return Silence() if self.live is None else self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep what the run was configured with.

        Args:
            values: Hyperparameters by name.
        """
        self.live.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one moment, which ends a step of DVCLive.

        Args:
            values: By name: numbers (tensors of one element too), texts, or dictionaries of them; others are
                left out with a warning.
            step: The training step they belong to; None: the next one.
            **kwargs: Arguments of `log_metric`.
        """
        can_log = import_module("dvclive.plots").Metric.could_log
        if step is not None:
            self.live.step = step
        for name, value in flatten(values).items():
            if can_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                logger.warning_once(
                    f"DVCLive leaves out {name!r}: a {type(value).__name__} is no number or text"
                )
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        """Write the summary and end the run."""
        self.live.end()
