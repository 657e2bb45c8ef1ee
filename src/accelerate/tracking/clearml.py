"""ClearML."""

from __future__ import annotations

from typing import Any

from accelerate.base import environ, wrong_value
from accelerate.tracking.base import TableTracker, on_main_process, plain

PREFIXES = ("eval", "test", "train")
SERIES = "train"


class ClearMLTracker(TableTracker):
    """Logs to a task of ClearML: the one that is running, or a new one, which is closed at the end.

    Args:
        run_name: Name of the project; with `project_name` among the further arguments, name of the task.
            `CLEARML_PROJECT` and `CLEARML_TASK` win over it.
        **kwargs: Arguments of `Task.init`.
    """

    name = package = "clearml"
    title = "ClearML"
    attribute = "task"
    configures_by = "connect_configuration"
    task: Any

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._initialized_externally = False

    def _open(self, library: Any) -> Any:
        running = library.Task.current_task()
        self._initialized_externally = bool(running)
        if running:
            return running
        usual = dict.fromkeys(("project_name", "task_name"), self.user_provided_run_name)
        variables = {"project_name": "CLEARML_PROJECT", "task_name": "CLEARML_TASK"}
        given = environ.current()
        names = {name: given[variable] for name, variable in variables.items() if variable in given}
        return library.Task.init(**{**usual, **self.init_kwargs, **names})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, strings, and dictionaries of numbers, which share a plot; warn about others.

        `eval_loss` is the series "eval" of "loss". Without a step the numbers are single values of the task.
        `kwargs` are arguments of `report_scalar`, or without a step of `report_single_value`.
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
        self, report: Any, name: str, series: str | None, number: Any, step: int | None, kwargs: Any
    ) -> None:
        if not isinstance(number, int | float):
            self._warn_left_out(name, number)
        elif step is None:
            full = name if series is None else f"{name}/{series}"
            report.report_single_value(name=full, value=number, **kwargs)
        else:
            title, own = self._get_title_series(name) if series is None else (name, series)
            report.report_scalar(title=title, series=own, value=number, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: By name: an image as `report_image` takes it, or a list of them.
            step: The training step they belong to.
            **kwargs: Arguments of `report_image`.
        """
        report = self.task.get_logger()
        for name, images in values.items():
            title, series = self._get_title_series(name)
            named = {series: images}
            if isinstance(images, list):
                named = {f"{series}_{index}": image for index, image in enumerate(images)}
            for own, image in named.items():
                report.report_image(title=title, series=own, iteration=step, image=image, **kwargs)

    def _log_table(
        self, name: str, columns: Any, data: Any, dataframe: Any, step: int | None, kwargs: dict[str, Any]
    ) -> None:
        if data is None and dataframe is None:
            raise wrong_value("data", data, "the table has no rows", "Pass data or dataframe")
        rows = [columns, *data] if columns and data is not None else data
        title, series = self._get_title_series(name)
        table = rows if dataframe is None else dataframe
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        """Close the task, unless it was running before."""
        if not self._initialized_externally:
            self.task.close()

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        """Return plot and series of a name: `eval_loss` is the series "eval" of the plot "loss"."""
        prefix, _, rest = name.partition("_")
        return (rest, prefix) if rest and prefix in PREFIXES else (name, SERIES)
