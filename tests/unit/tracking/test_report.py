"""The tracker "report": what `Accelerator.log` and `init_trackers` leave in the records of a run."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError, patch_environment
from accelerate.monitoring import Event, Record, Values, find_records, find_runs, newest_run
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


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3), 3.0])
def test_steps_of_other_types_become_integers(step: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path))
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.5}, step=step)
    accelerator.end_training()
    (values,) = [record for record in records_below(tmp_path) if isinstance(record, Values)]
    assert values.step == 3
    assert type(values.step) is int


def test_records_are_not_in_the_folders_of_the_project(tmp_path: Path) -> None:
    project = ProjectConfiguration(
        project_dir=str(tmp_path / "run"), logging_dir=str(tmp_path / "run" / "logs")
    )
    log(Accelerator(cpu=True, log_with="report", project_config=project))
    assert records_below(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_tracker_needs_no_folder(tmp_path: Path) -> None:
    with patch_environment(XDG_STATE_HOME=str(tmp_path)):
        log(Accelerator(cpu=True, log_with="report"))
        assert any(isinstance(record, Values) for record in records_below(newest_run()))


def test_values_of_a_project_are_in_the_records_of_its_run(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path))
    assert len(find_runs(tmp_path)) == 0
    log(accelerator)
    assert len(find_runs(tmp_path)) == 1


def test_records_that_are_switched_off_are_one_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path))
    with (
        patch_environment(ACCELERATE_RUN_RECORDS="no"),
        pytest.raises(ConfigurationError, match=r"ACCELERATE_RUN_RECORDS='no': .* log_with"),
    ):
        accelerator.init_trackers("project")
    accelerator.trackers = []


def test_all_means_the_installed_libraries_only(tmp_path: Path) -> None:
    assert "report" not in [str(name) for name in get_available_trackers()]
    assert "report" not in [str(name) for name in filter_trackers("all", str(tmp_path))]


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    state = PartialState(cpu=True)
    state._shared_state["process_index"], state._shared_state["num_processes"] = 1, 2
    tracker = ReportTracker("project")
    with patch_environment(ACCELERATE_RUN_RECORDS=str(tmp_path)):
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
    tracker = ReportTracker("project")
    with patch_environment(ACCELERATE_RUN_RECORDS=str(tmp_path)):
        tracker.start()
    with caplog.at_level(logging.WARNING):
        tracker.log({"loss": 1.0, "image of this test": torch.zeros(2)}, step=1)
    tracker.finish()
    assert "does not log 'image of this test': a Tensor" in caplog.text
    (values,) = [record for record in records_below(tmp_path) if isinstance(record, Values)]
    assert values.values == {"loss": 1.0}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a logged run, at the end of its trackers and of its state."""
    PartialState._reset_state()
    deadline = time.monotonic() + 10  # the thread of the records may still be writing
    while not (found := [record for record in caplog.records if record.levelname == "WARNING"]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return [record.getMessage() for record in found]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("case", ["full", "pipe", "folder"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_records_that_cannot_be_written_are_one_warning(
    case: str, is_alone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "records" / "rank-00000.jsonl"
    path.parent.mkdir()
    make = {
        "full": lambda: path.symlink_to("/dev/full"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[case]()
    project = ProjectConfiguration(project_dir=None if is_alone else str(tmp_path))
    with patch_environment(ACCELERATE_RUN_RECORDS=str(path.parent)):
        log(Accelerator(cpu=True, log_with="report", project_config=project))
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"The run is no longer recorded in {path.parent}: [Errno ")


def test_values_that_cannot_be_written_are_one_warning_and_later_ones_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.monitoring import records

    encode = records.encode

    def fail_at_two(record: Record) -> bytes:
        if isinstance(record, Values) and record.step in (1, 2):
            raise TypeError("no such value")
        return encode(record)

    monkeypatch.setattr(records, "encode", fail_at_two)
    accelerator = Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path))
    accelerator.init_trackers("project")
    for step in range(4):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.end_training()
    (warning,) = warnings_of(caplog)
    assert "are incomplete: TypeError('no such value')" in warning
    assert [record.step for record in records_below(tmp_path) if isinstance(record, Values)] == [0, 3]


def test_values_are_written_during_the_run_and_without_its_end(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="report", project_dir=str(tmp_path))
    accelerator.init_trackers("project")
    for step in range(3):
        accelerator.log({"loss": 1.0}, step=step)
        deadline = time.monotonic() + 30
        while len([record for record in records_below(tmp_path) if isinstance(record, Values)]) <= step:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    accelerator.end_training()


RUNS = """
import sys, time
import torch
from accelerate import Accelerator
from accelerate.monitoring import RecordThread, records
from accelerate.utils import ProjectConfiguration

case, folder, is_alone, is_ended = sys.argv[1], sys.argv[2], sys.argv[3] == "True", sys.argv[4] == "True"
RecordThread.SECONDS_TO_END = 0.5
if case == "hang":
    records.open = lambda *args, **kwargs: time.sleep(1000)
project = ProjectConfiguration(project_dir=None if is_alone else folder)
accelerator = Accelerator(cpu=True, log_with="report", project_config=project)
accelerator.init_trackers("project", config={"lr": 0.1})
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
for step in range(8):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.log({"loss": 1.0}, step=step)
assert accelerator.trackers
if is_ended:
    accelerator.end_training()
print("the end")
"""


@pytest.mark.parametrize(
    ("case", "is_ended", "is_alone"),
    [
        ("write", True, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("hang", False, False),
                ("hang", True, False),
                ("write", False, False),
                ("hang", False, True),
                ("hang", True, True),
                ("write", False, True),
                ("write", True, True),
            ]
        ),
    ],
)
def test_a_program_ends_with_its_records_or_with_one_warning(
    case: str, is_ended: bool, is_alone: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RUNS, case, str(tmp_path), str(is_alone), str(is_ended)]
    environ = {**os.environ, "ACCELERATE_RUN_RECORDS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    values = [record.step for record in records_below(tmp_path) if isinstance(record, Values)]
    is_hung = case == "hang"
    assert values == ([] if is_hung else list(range(8)))
    assert done.stderr.count(f"are not in {tmp_path}: the file system") == is_hung
    assert "Error" not in done.stderr
