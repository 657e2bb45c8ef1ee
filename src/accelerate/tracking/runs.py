"""Trackers of all libraries except MLflow, which log to a run, task or writer object."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate.base import PACKAGES, environ, is_tensorboard_available, require, wrong_value
from accelerate.logging import get_logger
from accelerate.tracking.base import (
    Columns,
    LibraryTracker,
    Rows,
    Silence,
    TableTracker,
    flatten,
    on_main_process,
    plain,
)

logger = get_logger(__name__)

HPARAMS_FILE = "hparams.yml"
STORABLE = (bool, int, float, str, type(None))
PREFIXES = ("eval", "test", "train")
SERIES = "train"


class RunTracker(LibraryTracker):
    """Base class of trackers whose library has `config`, and `init` for a run with `log` and `finish`."""

    run: Any
    main_process_only = False

    def _open(self, library: ModuleType) -> Any:
        return library.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        import_module(self.package).config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs all values that the library accepts.

        `kwargs` are arguments of `log` of the run.
        """
        self.run.log(plain(values), step=step, **kwargs)


class _ImageTracker(RunTracker):
    """Base class of trackers whose library has an `Image` class."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images.

        Args:
            values: Lists by name, of arrays or other arguments of the `Image` class of the library.
            step: The training step they belong to.
            **kwargs: Arguments of `log` of the run.
        """
        image = import_module(self.package).Image
        lists = {name: [image(item) for item in images] for name, images in values.items()}
        self.run.log(lists, step=step, **kwargs)


class WandBTracker(_ImageTracker, TableTracker):
    """Tracker that logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `wandb.init`.
    """

    name = package = "wandb"

    def _log_table(
        self, name: str, columns: Columns, data: Rows, dataframe: object, step: int | None, **kwargs: Any
    ) -> None:
        table = import_module("wandb").Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({name: table}, step=step, **kwargs)


class TrackioTracker(RunTracker):
    """Tracker that logs to Trackio, which stores its runs in files of this machine.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `trackio.init`.
    """

    name = package = "trackio"


class SwanLabTracker(_ImageTracker):
    """Tracker that logs to SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `swanlab.init`.
    """

    name = package = "swanlab"


class CometMLTracker(LibraryTracker):
    """Tracker that logs to Comet.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `comet_ml.start`, such as `online=False`.
    """

    name = package = "comet_ml"
    title = "Comet"
    accepts = "number, text or dict"
    attribute = "writer"
    configures_by = "log_parameters"
    ends_by = "end"
    writer: Any

    def _open(self, library: ModuleType) -> Any:
        return library.start(**{"project_name": self.run_name, **self.init_kwargs})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers, strings and dictionaries of numbers, and warns about other values.

        `kwargs` are arguments of `log_metric`, `log_other` or `log_metrics`.
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
                self._warn_left_out(name, value)


class AimTracker(LibraryTracker):
    """Tracker that logs to an Aim repository, with the configuration under "hparams".

    Args:
        run_name: Name of the run.
        logging_dir: Folder of the repository.
        **kwargs: Arguments of `aim.Run`.
    """

    name = package = "aim"
    attribute = "writer"
    ends_by = "close"
    writer: Any
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def _open(self, library: ModuleType) -> Any:
        run = library.Run(**{"repo": self.aim_repo_path, **self.init_kwargs})
        run.name = self.run_name
        return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers, strings, dictionaries of them, and objects of Aim.

        `kwargs` are arguments of `track`, such as `context`.
        """
        for name, value in flatten(values).items():
            tracked = import_module("aim").Text(value) if isinstance(value, str) else value
            self.writer.track(tracked, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Logs images.

        Args:
            values: Images by name. An image is an argument of `aim.Image`, or a pair of it and a caption, or
                a list.
            step: The training step they belong to.
            kwargs: Arguments of `aim.Image` under "aim_image" and of `track` under "track".
        """
        image_arguments = (kwargs or {}).get("aim_image", {})
        track_arguments = (kwargs or {}).get("track", {})
        for name, images in values.items():
            several = [_image(item, image_arguments) for item in images] if isinstance(images, list) else None
            tracked = several or _image(images, image_arguments)
            self.writer.track(tracked, name=name, step=step, **track_arguments)


def _image(value: object, arguments: dict[str, Any]) -> Any:
    image, caption = value if isinstance(value, tuple) else (value, "")
    return import_module("aim").Image(image, **{"caption": caption, **arguments})


class DVCLiveTracker(LibraryTracker):
    """Tracker that logs to the files of DVCLive.

    Args:
        run_name: Ignored, because DVC names its experiments.
        live: Existing `dvclive.Live`. None creates a new one.
        **kwargs: Arguments of `dvclive.Live`.
    """

    name = package = "dvclive"
    title = "DVCLive"
    attribute = "live"
    configures_by = "log_params"
    ends_by = "end"  # also writes the summary
    blocks = True

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def _open(self, library: ModuleType) -> Any:
        return library.Live(**self.init_kwargs) if self.live is None else self.live

    @property
    def tracker(self) -> Any:
        """`Live` object, or an object whose calls do nothing on ranks that do not log."""
        return Silence() if self.live is None else self.live

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers, strings and dictionaries of them, ends a step, and warns about other values.

        `kwargs` are arguments of `log_metric`.
        """
        can_log = import_module("dvclive.plots").Metric.could_log
        if step is not None:
            self.live.step = step
        for name, value in flatten(values).items():
            if can_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                self._warn_left_out(name, value)
        self.live.next_step()


class ClearMLTracker(TableTracker):
    """Tracker that logs to the current task of ClearML, or to a new one, which `finish` closes.

    Args:
        run_name: Name of the project, or name of the task if `project_name` is passed.
            `CLEARML_PROJECT` and `CLEARML_TASK` take precedence.
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

    def _open(self, library: ModuleType) -> Any:
        running = library.Task.current_task()
        self._initialized_externally = bool(running)
        if running:
            return running
        defaults = dict.fromkeys(("project_name", "task_name"), self.user_provided_run_name)
        variables = {"project_name": "CLEARML_PROJECT", "task_name": "CLEARML_TASK"}
        present = environ.current()
        names = {name: present[variable] for name, variable in variables.items() if variable in present}
        return library.Task.init(**{**defaults, **self.init_kwargs, **names})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers, strings and dictionaries of numbers, each in one plot, and warns about other values.

        `eval_loss` is the series "eval" of the plot "loss". Without a step, numbers are single values of the
        task. `kwargs` are arguments of `report_scalar`, or without a step of `report_single_value`.
        """
        report = self.task.get_logger()
        for name, value in plain(values).items():
            if isinstance(value, str):
                report.report_text(f"{name}: {value}")
                continue
            inner = value if isinstance(value, dict) else {None: value}
            for series, number in inner.items():
                self._log_number(report, name, series, number, step, **kwargs)

    def _log_number(
        self, report: Any, name: str, series: str | None, number: object, step: int | None, **kwargs: Any
    ) -> None:
        if not isinstance(number, int | float):
            self._warn_left_out(name, number)
        elif step is None:
            full = name if series is None else f"{name}/{series}"
            report.report_single_value(name=full, value=number, **kwargs)
        else:
            title, series_name = self._get_title_series(name) if series is None else (name, series)
            report.report_scalar(title=title, series=series_name, value=number, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images.

        Args:
            values: Images by name, which are arguments of `report_image`, or lists of them.
            step: The training step they belong to.
            **kwargs: Arguments of `report_image`.
        """
        report = self.task.get_logger()
        for name, images in values.items():
            title, series = self._get_title_series(name)
            named = {series: images}
            if isinstance(images, list):
                named = {f"{series}_{index}": image for index, image in enumerate(images)}
            for series_name, image in named.items():
                report.report_image(title=title, series=series_name, iteration=step, image=image, **kwargs)

    def _log_table(
        self, name: str, columns: Columns, data: Rows, dataframe: object, step: int | None, **kwargs: Any
    ) -> None:
        if data is None and dataframe is None:
            raise wrong_value("data", data, "the table has no rows", "Pass data or dataframe")
        rows = [columns, *data] if columns and data is not None else data
        title, series = self._get_title_series(name)
        table = rows if dataframe is None else dataframe
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )

    def finish(self) -> None:
        """Closes the task if this tracker has created it."""
        if not self._initialized_externally:
            self.task.close()

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        """Returns the plot and series of a name, such as plot "loss" and series "eval" of `eval_loss`."""
        prefix, _, rest = name.partition("_")
        return (rest, prefix) if rest and prefix in PREFIXES else (name, SERIES)


class TensorBoardTracker(LibraryTracker):
    """Tracker that logs to TensorBoard event files.

    Args:
        run_name: Name of the run, and of its folder in `logging_dir`.
        logging_dir: Folder of all runs.
        **kwargs: Arguments of `SummaryWriter`.
    """

    name = package = "tensorboard"
    title = "TensorBoard"
    accepts = "number, text or dict"
    attribute = "writer"
    ends_by = "close"
    writer: Any
    requires_logging_directory = True
    blocks = True

    def __init__(self, run_name: str, logging_dir: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir
        self.logging_dir = str(Path(logging_dir, run_name))

    @classmethod
    def available(cls) -> bool:
        """Returns whether tensorboard or tensorboardX is installed."""
        return is_tensorboard_available()

    def _import(self) -> Any:
        if PACKAGES["tensorboardX"].available() and not PACKAGES["tensorboard"].available():
            return import_module("tensorboardX")
        require("tensorboard", "TensorBoardTracker")
        return import_module("torch.utils.tensorboard")

    def _open(self, library: ModuleType) -> Any:
        logger.debug("TensorBoard run %s logs to %s", self.run_name, self.logging_dir)
        return library.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores hyperparameters for TensorBoard and in `<logging_dir>/<run>/<time>/hparams.yml`.

        Args:
            values: Values by name. Other types than numbers, strings, bools and None are stored as strings.
        """
        import yaml

        storable = {
            name: value if type(value) in STORABLE else str(value) for name, value in plain(values).items()
        }
        # TensorBoard does not support None.
        shown = {name: str(value) if value is None else value for name, value in storable.items()}
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))  # the path that other programs read
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HPARAMS_FILE).write_text(yaml.safe_dump(storable), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers, strings and dictionaries of numbers, and warns about other values.

        `kwargs` are arguments of `add_scalar`, `add_text` or `add_scalars`.
        """
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            elif _can_be_plotted(value):
                self.writer.add_scalar(name, float(value), global_step=step, **kwargs)
            else:
                self._warn_left_out(name, value)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images.

        Args:
            values: Arrays or tensors by name, of shape (images, channels, height, width).
            step: The training step they belong to.
            **kwargs: Arguments of `add_images`, such as `dataformats="NHWC"`.
        """
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)
        self.writer.flush()


def _can_be_plotted(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
