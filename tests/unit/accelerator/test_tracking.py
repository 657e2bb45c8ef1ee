"""Trackers through the accelerator: started, fed and finished in order."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.plugins import ProjectConfiguration
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


def test_arguments_of_a_tracker_that_does_not_exist_are_refused() -> None:
    accelerator = Accelerator(cpu=True, log_with=Notebook())
    accelerator.init_trackers("project", init_kwargs={"notebook": {}, "wandb": {"tags": ["a"]}})
    with pytest.raises(ConfigurationError, match=r"init_kwargs=\['wandbb'\]: its keys are names of trackers"):
        accelerator.init_trackers("project", init_kwargs={"wandbb": {"tags": ["a"]}})


def test_without_trackers_calls_have_no_effect() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"loss": 1.0})
    blank = accelerator.get_tracker("wandb")
    blank.start()
    blank.store_init_configuration({"a": 1})
    blank.log({"loss": 1.0}, step=1)
    blank.finish()
    accelerator.end_training()


@pytest.mark.parametrize("config", [[1], "lr", 3.0, {1, 2}])
def test_a_config_without_names_is_refused(config: Any) -> None:
    accelerator = Accelerator(cpu=True, log_with=Notebook())
    with pytest.raises(ConfigurationError, match=r"config=.*: the values have no names") as raised:
        accelerator.init_trackers("project", config=config)
    assert isinstance(raised.value, AttributeError)


def test_values_without_names_and_arguments_that_are_no_dictionaries_are_refused() -> None:
    accelerator = Accelerator(cpu=True, log_with=Notebook())
    for arguments in ([1], {"notebook": 3}):
        with pytest.raises(ConfigurationError, match="Pass dictionaries by the name of the tracker"):
            accelerator.init_trackers("project", init_kwargs=arguments)  # type: ignore[arg-type]
    accelerator.init_trackers("project")
    for values in ([1], None, 2.0):
        with pytest.raises(ConfigurationError, match="^values=.*: the values have no names"):
            accelerator.log(values)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="^log_kwargs=3: its keys are names of trackers"):
        accelerator.log({"loss": 1.0}, log_kwargs=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"project_dir": 5}, {"project_dir": [1]}])
def test_a_project_folder_that_is_no_path_is_refused(arguments: dict[str, Any]) -> None:
    for kind in (Accelerator, ProjectConfiguration):
        with pytest.raises(ConfigurationError, match="^project_dir=.*: it is not a path") as raised:
            kind(**arguments)
        assert isinstance(raised.value, TypeError)
