"""Accumulation, loading and project folders."""

import pytest

from accelerate.base import ConfigurationError
from accelerate.plugins import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration


def test_one_step_is_what_differs_from_the_defaults() -> None:
    assert GradientAccumulationPlugin(num_steps=1).to_kwargs() == {"num_steps": 1}
    assert GradientAccumulationPlugin(num_steps=2, sync_each_batch=True).to_kwargs() == {
        "num_steps": 2,
        "sync_each_batch": True,
    }
    assert GradientAccumulationPlugin().to_kwargs() == {}


@pytest.mark.parametrize("steps", [0, -2])
def test_there_is_at_least_one_step(steps: int) -> None:
    with pytest.raises(ConfigurationError, match=f"num_steps={steps}"):
        GradientAccumulationPlugin(num_steps=steps)


def test_loading_can_be_changed_later() -> None:
    config = DataLoaderConfiguration(split_batches=True)
    config.data_seed, config.non_blocking = 3, True
    assert config == DataLoaderConfiguration(split_batches=True, data_seed=3, non_blocking=True)


def test_logs_are_written_to_the_project_folder_by_default() -> None:
    assert ProjectConfiguration().logging_dir is None
    assert ProjectConfiguration(project_dir="run").logging_dir == "run"
    assert ProjectConfiguration(project_dir="run", logging_dir="logs").logging_dir == "logs"


def test_directories_can_be_set_later() -> None:
    config = ProjectConfiguration()
    config.set_directories("run")
    assert (config.project_dir, config.logging_dir) == ("run", "run")
    config.set_directories("other")
    assert (config.project_dir, config.logging_dir) == ("other", "run")


@pytest.mark.parametrize("wrong", [{"total_limit": 0}, {"iteration": -1}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        ProjectConfiguration(**wrong)  # type: ignore[arg-type]
