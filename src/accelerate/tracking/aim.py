"""Aim."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelerate.tracking.base import LibraryTracker, flatten, on_main_process


class AimTracker(LibraryTracker):
    """Logs to an Aim repository.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of the repository.
        **kwargs: Arguments of `aim.Run`.
    """

    name = package = "aim"
    attribute = "writer"
    writer: Any
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs

    def _open(self, library: Any) -> Any:
        run = library.Run(**{"repo": self.aim_repo_path, **self.init_kwargs})
        run.name = self.run_name
        return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep what the run was configured with, under "hparams".

        Args:
            values: Hyperparameters by name.
        """
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one moment.

        Args:
            values: By name: numbers (tensors of one element too), texts, dictionaries of them, or objects of
                Aim.
            step: The training step they belong to.
            **kwargs: Arguments of `track`, such as `context`.
        """
        for name, value in flatten(values).items():
            tracked = import_module("aim").Text(value) if isinstance(value, str) else value
            self.writer.track(tracked, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Keep images of one moment.

        Args:
            values: By name: an image as `aim.Image` takes it, a pair of image and caption, or a list.
            step: The training step they belong to.
            kwargs: Arguments of `aim.Image` under "aim_image" and of `track` under "track".
        """
        further = kwargs or {}
        of_image, of_track = further.get("aim_image", {}), further.get("track", {})
        for name, images in values.items():
            shown = [_image(each, of_image) for each in images] if isinstance(images, list) else None
            self.writer.track(shown or _image(images, of_image), name=name, step=step, **of_track)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()


def _image(value: Any, arguments: dict[str, Any]) -> Any:
    image, caption = value if isinstance(value, tuple) else (value, "")
    return import_module("aim").Image(image, **{"caption": caption, **arguments})
