"""TensorBoard."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.base import PACKAGES, is_tensorboard_available, require
from accelerate.logging import get_logger
from accelerate.tracking.base import LibraryTracker, on_main_process

logger = get_logger(__name__)

HPARAMS_FILE = "hparams.yml"
STORABLE = (bool, int, float, str, type(None))


class TensorBoardTracker(LibraryTracker):
    """Logs to TensorBoard event files.

    Args:
        run_name: Name of the run: a folder inside `logging_dir`.
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
        """Return whether tensorboard or tensorboardX is installed."""
        return is_tensorboard_available()

    def _import(self) -> Any:
        if PACKAGES["tensorboardX"].available() and not PACKAGES["tensorboard"].available():
            return import_module("tensorboardX")
        require("tensorboard", "TensorBoardTracker")
        return import_module("torch.utils.tensorboard")

    def _open(self, library: Any) -> Any:
        logger.debug("TensorBoard run %s logs to %s", self.run_name, self.logging_dir)
        return library.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, for TensorBoard's own page and in `<logging_dir>/<run>/<time>/hparams.yml`.

        Args:
            values: By name; what is no number, string, bool or None is stored as its `str`.
        """
        import yaml

        storable = {
            name: value if isinstance(value, STORABLE) else str(value) for name, value in values.items()
        }
        # TensorBoard has no None.
        shown = {name: str(value) if value is None else value for name, value in storable.items()}
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))  # where other programs look for it
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HPARAMS_FILE).write_text(yaml.safe_dump(storable))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, strings and dictionaries of numbers; leave out others with a warning.

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
        """Log images.

        Args:
            values: By name: arrays or tensors of shape (images, channels, height, width).
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
