"""Trackers whose library returns a run object: wandb, Trackio, SwanLab, Comet, Aim and DVCLive."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelerate.tracking.base import LibraryTracker, Silence, TableTracker, flatten, on_main_process, plain


class RunTracker(LibraryTracker):
    """A tracker whose library has `init`, which returns a run with `log` and `finish`, and `config`."""

    run: Any
    main_process_only = False

    def _open(self, library: Any) -> Any:
        return library.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        import_module(self.package).config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log all values that the library takes; `kwargs` are arguments of the run's `log`."""
        self.run.log(plain(values), step=step, **kwargs)


class _ImageTracker(RunTracker):
    """A run whose library has an `Image`."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: By name: lists of arrays, or whatever the `Image` of the library takes.
            step: The training step they belong to.
            **kwargs: Arguments of the run's `log`.
        """
        image = import_module(self.package).Image
        lists = {name: [image(item) for item in images] for name, images in values.items()}
        self.run.log(lists, step=step, **kwargs)


class WandBTracker(_ImageTracker, TableTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `wandb.init`.
    """

    name = package = "wandb"

    def _log_table(
        self, name: str, columns: Any, data: Any, dataframe: Any, step: int | None, kwargs: dict[str, Any]
    ) -> None:
        table = import_module("wandb").Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({name: table}, step=step, **kwargs)


class TrackioTracker(RunTracker):
    """Logs to Trackio, a tracker that keeps its runs in files of this machine.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `trackio.init`.
    """

    name = package = "trackio"


class SwanLabTracker(_ImageTracker):
    """Logs to SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `swanlab.init`.
    """

    name = package = "swanlab"


class CometMLTracker(LibraryTracker):
    """Logs to Comet.

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

    def _open(self, library: Any) -> Any:
        return library.start(**{"project_name": self.run_name, **self.init_kwargs})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, strings, and dictionaries of numbers under the names in them; warn about others.

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
    """Logs to an Aim repository, the configuration under "hparams".

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

    def _open(self, library: Any) -> Any:
        run = library.Run(**{"repo": self.aim_repo_path, **self.init_kwargs})
        run.name = self.run_name
        return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, strings, dictionaries of them, and objects of Aim.

        `kwargs` are arguments of `track`, such as `context`.
        """
        for name, value in flatten(values).items():
            tracked = import_module("aim").Text(value) if isinstance(value, str) else value
            self.writer.track(tracked, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images.

        Args:
            values: By name: an image as `aim.Image` takes it, a pair of image and caption, or a list.
            step: The training step they belong to.
            kwargs: Arguments of `aim.Image` under "aim_image" and of `track` under "track".
        """
        image_arguments = (kwargs or {}).get("aim_image", {})
        track_arguments = (kwargs or {}).get("track", {})
        for name, images in values.items():
            several = [_image(item, image_arguments) for item in images] if isinstance(images, list) else None
            tracked = several or _image(images, image_arguments)
            self.writer.track(tracked, name=name, step=step, **track_arguments)


def _image(value: Any, arguments: dict[str, Any]) -> Any:
    image, caption = value if isinstance(value, tuple) else (value, "")
    return import_module("aim").Image(image, **{"caption": caption, **arguments})


class DVCLiveTracker(LibraryTracker):
    """Logs to the files of DVCLive.

    Args:
        run_name: Not used: DVC names its experiments.
        live: A `dvclive.Live` of one's own; None: a new one.
        **kwargs: Arguments of `dvclive.Live`.
    """

    name = package = "dvclive"
    title = "DVCLive"
    attribute = "live"
    configures_by = "log_params"
    ends_by = "end"  # which also writes the summary
    blocks = True

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def _open(self, library: Any) -> Any:
        return library.Live(**self.init_kwargs) if self.live is None else self.live

    @property
    def tracker(self) -> Any:
        """The `Live`; on processes that do not log, an object whose calls do nothing."""
        return Silence() if self.live is None else self.live

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, strings and dictionaries of them, which ends a step; leave out others with a warning.

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
