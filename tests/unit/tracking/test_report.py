"""The tracker "report": what `Accelerator.log` and `init_trackers` leave in the records of a run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError, patch_environment
from accelerate.monitoring import Event, Record, Values, find_records
from accelerate.state import PartialState
from accelerate.tracking import ReportTracker, filter_trackers, get_available_trackers
from accelerate.utils import ProjectConfiguration

pytestmark = pytest.mark.usefixtures("states")


def records_below(folder: Path) -> list[Record]:
    return [record for records in find_records(folder) for record in records]


def log(accelerator: Accelerator) -> None:
    """Log one step in a run."""
    accelerator.init_trackers("project", config={"lr": 0.1, "net": {"depth": 3}})
    accelerator.log({"loss": torch.tensor(0.5), "eval": {"acc": math.nan}, "note": "a\nb"}, step=3)
    accelerator.end_training()


def test_values_and_configuration_become_records(tmp_path: Path) -> None:
    log(Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path)))
    records = records_below(tmp_path)
    (values,) = [record for record in records if isinstance(record, Values)]
    config = [json.loads(record.text) for record in records if isinstance(record, Event)]
    assert values.step == 3
    assert values.values.keys() == {"loss", "eval/acc", "note"}
    assert (values.values["loss"], values.values["note"]) == (0.5, "a\nb")
    assert math.isnan(values.values["eval/acc"])
    assert config == [{"project_name": "project"}, {"lr": "0.1", "net/depth": "3"}]


def test_records_are_in_the_project_and_not_in_the_folder_of_logs(tmp_path: Path) -> None:
    project = ProjectConfiguration(
        project_dir=str(tmp_path / "run"), logging_dir=str(tmp_path / "run" / "logs")
    )
    log(Accelerator(cpu=True, log_with="report", project_config=project))
    assert (tmp_path / "run" / "run_records" / "rank-00000.jsonl").exists()
    assert not (tmp_path / "run" / "logs").exists()


def test_a_folder_of_logs_alone_is_enough(tmp_path: Path) -> None:
    project = ProjectConfiguration(logging_dir=str(tmp_path))
    log(Accelerator(cpu=True, log_with="report", project_config=project))
    assert records_below(tmp_path)


def test_the_variable_names_another_folder(tmp_path: Path) -> None:
    with patch_environment(ACCELERATE_RUN_RECORDS=str(tmp_path / "records")):
        log(Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path / "run")))
    assert records_below(tmp_path / "records")
    assert not (tmp_path / "run").exists()


def test_records_that_are_switched_off_are_one_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path))
    with (
        patch_environment(ACCELERATE_RUN_RECORDS="no"),
        pytest.raises(ConfigurationError, match=r"ACCELERATE_RUN_RECORDS='no': .* log_with"),
    ):
        accelerator.init_trackers("project")
    accelerator.trackers = []


def test_the_tracker_needs_a_folder() -> None:
    with pytest.raises(ConfigurationError, match=r"log_with='report': it needs a folder.*project_dir"):
        filter_trackers("report")


def test_all_means_the_installed_libraries_only(tmp_path: Path) -> None:
    assert "report" not in [str(name) for name in get_available_trackers()]
    assert "report" not in [str(name) for name in filter_trackers("all", str(tmp_path))]


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    state = PartialState(cpu=True)
    state._shared_state["process_index"], state._shared_state["num_processes"] = 1, 2
    tracker = ReportTracker("project", str(tmp_path))
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    assert tracker.tracker is None
    assert records_below(tmp_path) == []


def test_values_that_are_no_numbers_or_text_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PartialState(cpu=True)
    tracker = ReportTracker("project", str(tmp_path))
    tracker.start()
    with caplog.at_level(logging.WARNING):
        tracker.log({"loss": 1.0, "image of this test": torch.zeros(2)}, step=1)
    tracker.finish()
    assert "does not log 'image of this test': a Tensor" in caplog.text
    (values,) = [record for record in records_below(tmp_path) if isinstance(record, Values)]
    assert values.values == {"loss": 1.0}
