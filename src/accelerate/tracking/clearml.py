"""ClearML."""

from __future__ import annotations

from typing import Any

from accelerate.base import environ, wrong_value
from accelerate.logging import get_logger
from accelerate.tracking.base import LibraryTracker, on_main_process, plain

logger = get_logger(__name__)

PREFIXES = ("eval", "test", "train")
SERIES = "train"


class ClearMLTracker(LibraryTracker):
    """Logs to a task of ClearML: the one that is running, or a new one, which is closed at the end.

    Args:
        run_name: Name of the project; with `project_name` among the further arguments, name of the task.
            `CLEARML_PROJECT` and `CLEARML_TASK` win over it.
        **kwargs: Arguments of `Task.init`.
    """

    name = package = "clearml"
    attribute = "task"
    task: Any
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self._initialized_externally = False

    def _open(self, library: Any) -> Any:
        running = library.Task.current_task()
        self._initialized_externally = bool(running)
        return running or library.Task.init(**self._names(), **self._arguments())

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep what the task was configured with.

        Args:
            values: Hyperparameters by name.
        """
        self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one moment.

        Args:
            values: By name: numbers (tensors of one element too), texts, or dictionaries of numbers, which
                share a plot; others are left out with a warning. `eval_loss` is the series "eval" of "loss".
            step: The training step they belong to; None: they are the single values of the task.
            **kwargs: Arguments of `report_scalar`, or without a step of `report_single_value`.
        """
        report = self.task.get_logger()
        for name, value in plain(values).items():
            if isinstance(value, str):
                report.report_text(f"{name}: {value}")
                continue
            inner = value if isinstance(value, dict) else {None: value}
            for series, number in inner.items():
                self._log_number(report, name, series, number, step, kwargs)

    def _log_number(
        self,
        report: Any,
        name: str,
        series: str | None,
        number: Any,
        step: int | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Keep one number, in the plot and series of its name.

        Args:
            report: The logger of the task.
            name: Its name.
            series: Its series, where it came in a dictionary.
            number: Its value.
            step: The training step.
            kwargs: Arguments of the report.
        """
        if not isinstance(number, int | float):
            logger.warning_once(
                f"ClearML leaves out {name!r}: a {type(number).__name__} is no number or text"
            )
        elif step is None:
            full = name if series is None else f"{name}/{series}"
            report.report_single_value(name=full, value=number, **kwargs)
        else:
            title, own = self._get_title_series(name) if series is None else (name, series)
            report.report_scalar(title=title, series=own, value=number, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of one moment.

        Args:
            values: By name: an image as `report_image` takes it, or a list of them.
            step: The training step they belong to.
            **kwargs: Arguments of `report_image`.
        """
        report = self.task.get_logger()
        for name, images in values.items():
            title, series = self._get_title_series(name)
            named = (
                {f"{series}_{index}": image for index, image in enumerate(images)}
                if isinstance(images, list)
                else {series: images}
            )
            for own, image in named.items():
                report.report_image(title=title, series=own, iteration=step, image=image, **kwargs)

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
            **kwargs: Arguments of `report_table`.

        Raises:
            ConfigurationError: There are neither rows nor a data frame.
        """
        if data is None and dataframe is None:
            raise wrong_value("data", data, "the table has no rows", "Pass data or dataframe")
        rows = [columns, *data] if columns and data is not None else data
        title, series = self._get_title_series(table_name)
        shown = rows if dataframe is None else dataframe
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=shown, iteration=step, **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        """Close the task, unless it was running before."""
        if not self._initialized_externally:
            self.task.close()

    def _names(self) -> dict[str, Any]:
        """Names of project and task, where the further arguments do not give them."""
        variables, given = environ.current(), self.init_kwargs
        own = self.user_provided_run_name
        project = variables.get("CLEARML_PROJECT", given.get("project_name", own))
        task = variables.get("CLEARML_TASK", given.get("task_name", own))
        return {"project_name": project, "task_name": task}

    def _arguments(self) -> dict[str, Any]:
        return {name: value for name, value in self.init_kwargs.items() if name not in self._names()}

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        """Return plot and series of a name: `eval_loss` is the series "eval" of the plot "loss".

        Args:
            name: The name of a value.
        """
        prefix, _, rest = name.partition("_")
        return (rest, prefix) if rest and prefix in PREFIXES else (name, SERIES)
