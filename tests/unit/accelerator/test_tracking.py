"""Trackers through the accelerator: started, fed and finished in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.accelerator.trackers import Trackers
from accelerate.base import ConfigurationError
from accelerate.plugins import ProjectConfiguration
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker

pytestmark = pytest.mark.usefixtures("states")


class Notebook(GeneralTracker):
    """Writes down every call."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


def test_a_custom_tracker_receives_every_call() -> None:
    notebook = Notebook()
    accelerator = Accelerator(cpu=True, log_with=notebook)
    assert accelerator.log_with == [notebook]
    assert accelerator.trackers == []
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 2.0}, step=3, log_kwargs={"notebook": {"note": "x"}, "other": {"y": 1}})
    accelerator.end_training()
    assert notebook.calls == ["start", {"lr": 1}, ({"loss": 2.0}, 3, {"note": "x"}), "finish"]


def test_running_trackers_are_found_by_name() -> None:
    notebook = Notebook()
    accelerator = Accelerator(cpu=True, log_with=[notebook])
    accelerator.init_trackers("project")
    assert accelerator.get_tracker("notebook") is notebook
    assert accelerator.get_tracker("notebook", unwrap=True) is notebook.calls
    with pytest.raises(ConfigurationError, match="name='wandb'.*notebook"):
        accelerator.get_tracker("wandb")


def test_without_trackers_calls_have_no_effect() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"loss": 1.0})
    blank = accelerator.get_tracker("wandb")
    blank.log({"loss": 1.0}, step=1)
    accelerator.end_training()


def test_tensorboard_writes_into_the_logging_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is an optional package")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_trackers_run_without_an_accelerator() -> None:
    PartialState(cpu=True)
    trackers, notebook = Trackers(), Notebook()
    assert type(trackers.find("notebook", unwrap=False)) is GeneralTracker  # none is running yet
    trackers.start([notebook], "project", ProjectConfiguration(), {"rate": 1}, None)
    trackers.log({"loss": 2}, 3, {"notebook": {"note": "x"}})
    assert trackers.find("notebook", unwrap=True) is notebook.calls
    for sender in trackers.senders_of_running():
        sender.finish()
    assert notebook.calls == ["start", {"rate": 1}, ({"loss": 2}, 3, {"note": "x"}), "finish"]
    with pytest.raises(ConfigurationError, match="the running trackers are notebook"):
        trackers.find("other", unwrap=False)
