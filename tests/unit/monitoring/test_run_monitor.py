"""The records that a run leaves, its conclusions and the times that it prints."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import patch_environment
from accelerate.monitoring import (
    PHASES,
    Checkpoint,
    Conclusion,
    End,
    Event,
    RunMonitor,
    Start,
    StepTimes,
    Window,
    find_records,
    recorded_paths,
)
from accelerate.monitoring.run_monitor import format_table, join_windows
from accelerate.monitoring.step_clock import ClosedWindow
from accelerate.state import AcceleratorState, record_event, services

pytestmark = pytest.mark.usefixtures("states")


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.monitoring.step_clock.INTERVAL", 0.05)
    monkeypatch.setattr("accelerate.monitoring.run_monitor.INTERVAL", 0.02)


def train(accelerator: Accelerator, steps: int, rest: float = 0.01) -> None:
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(rest)


def test_a_run_leaves_windows_with_values_checkpoints_and_its_end(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 30)
    accelerator.save_state(tmp_path / "one")
    record_event("warning", "something")
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(tmp_path)
    start, *rest = list(records)
    assert isinstance(start, Start)
    assert {"mixed_precision", "gradient_accumulation_steps"} <= {setting.name for setting in start.settings}
    assert (start.node, start.num_nodes, start.script) == (0, 1, Path(sys.argv[0]).name)
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]
    windows = [record for record in rest if isinstance(record, Window)]
    assert windows[0].first == 1
    assert windows[-1].last == 30
    assert [window.first for window in windows[1:]] == [window.last + 1 for window in windows[:-1]]
    assert (windows[0].last, windows[0].values.keys()) == (1, {"learning_rate"})  # recorded at once
    assert windows[1].values.keys() == {"loss", "gradient_norm", "learning_rate"}
    assert windows[1].values["learning_rate"] == 0.5
    assert windows[0].memory > 0
    (save,) = [record for record in rest if isinstance(record, Checkpoint)]
    assert (save.event, save.path, save.step) == ("committed", str(tmp_path / "one"), 30)
    assert save.seconds == save.blocked > 0
    assert save.size > 0
    assert [record.text for record in rest if isinstance(record, Event)] == ["something"]
    assert isinstance(rest[-1], End)
    assert rest[-1].how == "finished"


def test_the_step_of_a_checkpoint_is_exact_after_short_steps(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 777, rest=0.0)
    accelerator.save_state(tmp_path / "one")
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(tmp_path)
    assert [record.step for record in records if isinstance(record, Checkpoint)] == [777]


@pytest.mark.parametrize("num_items", [None, 8])
def test_the_loss_of_a_window_is_the_one_that_backward_got(tmp_path: Path, num_items: int | None) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loss = 0.0
    for _ in range(120):
        with accelerator.accumulate(model, num_items=num_items):
            result = model(torch.ones(2, 4)).sum()
            accelerator.backward(result)
            optimizer.step()
            optimizer.zero_grad()
        loss = result.item()
        time.sleep(0.01)
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(tmp_path)
    windows = [record for record in records if isinstance(record, Window)]
    losses = [
        window.values["loss"] for window in windows if "loss" in window.values
    ]  # the last may have none
    assert losses == pytest.approx([loss] * len(losses))
    assert losses


def test_a_save_in_the_background_blocks_for_a_part(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 10)
    accelerator.save_state(tmp_path / "one", blocking=False)
    accelerator.wait_for_checkpoint()
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(tmp_path)
    (save,) = [record for record in records if isinstance(record, Checkpoint)]
    assert 0 < save.blocked < save.seconds


def test_without_a_project_there_are_no_records_and_no_thread(tmp_path: Path) -> None:
    train(Accelerator(cpu=True), 30)
    assert "accelerate-monitor" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("value", ["no", "NO", "0"])
def test_the_option_turns_records_off(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_RUN_RECORDS", value)
    train(Accelerator(cpu=True, project_dir=tmp_path), 20)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert find_records(tmp_path) == []


def test_the_option_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_RUN_RECORDS", str(tmp_path / "records"))
    train(Accelerator(cpu=True), 20)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(find_records(tmp_path / "records")) == 1


@pytest.mark.parametrize(("variable", "levels"), [("", []), ("yes", ["WARNING"]), ("FOLDER", ["WARNING"])])
def test_a_folder_that_cannot_be_written_gives_a_warning_only_if_the_user_set_it(
    variable: str, levels: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    blocked = str(tmp_path / "file" / "state")
    with patch_environment(
        XDG_STATE_HOME=blocked, ACCELERATE_RUN_RECORDS=variable.replace("FOLDER", blocked)
    ):
        train(Accelerator(cpu=True, project_dir=tmp_path), 40)
        AcceleratorState._reset_state(reset_partial_state=True)
    assert [record.levelname for record in caplog.records] == levels
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_user_without_a_home_has_no_records_and_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accelerate.monitoring.run_folders.expanded", Path)
    with patch_environment(XDG_STATE_HOME=""):
        train(Accelerator(cpu=True, project_dir=tmp_path), 10)
        AcceleratorState._reset_state(reset_partial_state=True)
    assert not caplog.records
    assert not list(tmp_path.iterdir())


def test_a_process_of_a_launch_leaves_the_path_of_its_records(tmp_path: Path) -> None:
    variables = {"ACCELERATE_FAILURE_DIR": str(tmp_path), "ACCELERATE_RUN_ID": "20260102-030405-0123abcd"}
    with patch_environment(ACCELERATE_RUN_RECORDS="yes", **variables):
        train(Accelerator(cpu=True), 30)
        AcceleratorState._reset_state(reset_partial_state=True)
    ((rank, path),) = recorded_paths(tmp_path)
    assert rank == 0
    assert path.parent.name == "20260102-030405-0123abcd"
    assert windows_of(path.parent)[-1].last == 30


SECRET = "hunter2-in-no-record"


def test_variables_and_arguments_of_the_script_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/user/train.py", "--token", SECRET])
    variables = {
        "HF_TOKEN": SECRET,
        "ACCELERATE_RUN_KEY": SECRET,
        "ACCELERATE_STOP_FILE": SECRET,
        "FSDP_TRANSFORMER_CLS_TO_WRAP": SECRET,
        "MASTER_ADDR": SECRET,
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_HANG_TIMEOUT": "77",
    }
    with patch_environment(**variables):
        train(Accelerator(cpu=True, project_dir=tmp_path), 10)
        AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(tmp_path)
    text = records.path.read_text(encoding="utf-8")
    assert SECRET not in text
    assert socket.gethostname() not in text
    start = next(iter(records))
    assert isinstance(start, Start)
    assert start.script == "train.py"
    settings = {setting.name: setting.value for setting in start.settings}
    assert (settings["hang_timeout"], settings["stop_file"]) == ("77", "set")


def test_a_long_run_writes_fewer_windows_of_the_same_steps_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.monitoring.run_monitor.MAX_PART", 1000)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 60)
    seconds = accelerator.step_times().seconds
    AcceleratorState._reset_state(reset_partial_state=True)
    first, window = windows_of(tmp_path)
    assert (first.first, first.last + 1, window.last) == (1, window.first, 60)
    assert first.seconds + window.seconds == pytest.approx(seconds, rel=0.2)
    assert sum(window.seconds_by.values()) == pytest.approx(window.seconds)
    assert window.values.keys() == {"loss", "gradient_norm", "learning_rate"}


def test_only_windows_whose_steps_follow_each_other_are_joined() -> None:
    times = StepTimes(10, 2.0, dict.fromkeys(PHASES, 0.25), 40)
    windows = [ClosedWindow(1.0, last, times, {"loss": last}, {"lost": 1.0}) for last in (10, 20, 15, 25)]
    joined = join_windows(windows)
    assert [(window.last, window.times.steps, window.times.seconds) for window in joined] == [
        (20, 20, 4.0),
        (25, 20, 4.0),
    ]
    assert [(window.values, window.recovery) for window in joined] == [
        ({"loss": 20}, {"lost": 2.0}),
        ({"loss": 25}, {"lost": 2.0}),
    ]


def test_windows_have_the_position_in_the_epoch(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.ones(80, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        time.sleep(0.01)
    AcceleratorState._reset_state(reset_partial_state=True)
    windows = windows_of(tmp_path)
    assert {window.num_batches for window in windows} == {40}
    assert 0 < windows[0].batch <= windows[1].batch <= 40


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_time_of_steps_is_printed_at_the_end_only_on_request(
    is_asked: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="accelerate")
    with patch_environment(ACCELERATE_STEP_TIMES=str(is_asked)):
        accelerator = Accelerator(cpu=True)
        train(accelerator, 110, rest=0.0)
        accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
    out, printed = capfd.readouterr()
    assert ("110 steps in" in printed, "backward" in printed) == (is_asked, is_asked)
    assert "steps in" not in caplog.text + out


def test_the_table_has_the_items_and_flops_of_a_run_that_counts_them() -> None:
    seconds_by = dict.fromkeys(PHASES, 0.0)
    times = StepTimes(10, 2.0, seconds_by, 40, items=5000.0, step_flops=1e14, peak_flops=1e15)
    expected = "(5 steps/s, 20 samples/s on each rank, 2500 items/s, 500 TFLOP/s on each rank, MFU 50.0%)"
    assert expected in format_table(times, [])


FAILS = """
import sys, time, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
for step in range(8):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    time.sleep(0.03)
    if step == 6:
        accelerator.save_state(sys.argv[1] + "/one")
        time.sleep(0.2)
raise ValueError("the data is wrong")
"""


def test_a_run_that_fails_records_its_error(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FAILS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    (records,) = find_records(tmp_path)
    every = list(records)
    assert isinstance(every[0], Start)
    end = every[-1]
    assert isinstance(end, End)
    assert end.how == "failed"
    assert "ValueError: the data is wrong" in end.error
    assert not [record for record in every if isinstance(record, Conclusion) and record.name == "straggler"]


def windows_of(folder: Path) -> list[Window]:
    (records,) = find_records(folder)
    return [record for record in records if isinstance(record, Window)]


def train_with_losses(accelerator: Accelerator, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = torch.nn.Linear(4, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(40):
        loss = loss_of(model(torch.ones(1, 4)))
        accelerator.backward(loss, gradient=torch.ones_like(loss))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


@pytest.mark.parametrize(
    "loss_of", [lambda out: out, lambda out: out.to(torch.complex64).sum()], ids=["several", "complex"]
)
def test_a_loss_that_is_no_number_is_left_out_of_the_records(
    loss_of: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_with_losses(Accelerator(cpu=True, project_dir=tmp_path), loss_of)
    AcceleratorState._reset_state(reset_partial_state=True)
    windows = windows_of(tmp_path)
    assert windows[-1].last == 40
    assert {name for window in windows for name in window.values} == {"learning_rate"}
    assert not caplog.records


def test_an_exception_in_the_thread_is_reported_once_and_the_recording_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail_at_first(meter: object) -> int:
        calls.append(1)
        if len(calls) < 3:
            raise KeyError("no such counter")
        return 1

    monkeypatch.setattr("accelerate.diagnostics.MemoryMeter.peak", fail_at_first)
    train(Accelerator(cpu=True, project_dir=tmp_path), 60)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert windows_of(tmp_path)[-1].last == 60
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "Records of this run are incomplete: KeyError('no such counter'). Training continues."


def test_a_folder_that_is_removed_during_the_run_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_RUN_RECORDS", str(tmp_path / "project"))
    accelerator = Accelerator(cpu=True, project_dir=tmp_path / "project")
    train(accelerator, 30)
    shutil.rmtree(tmp_path / "project")
    for _ in range(2):
        record_event("warning", "something")
        time.sleep(0.2)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is no longer recorded in" in caplog.text
    assert not (tmp_path / "project").exists()


def test_a_folder_that_the_program_removes_at_its_end_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_RUN_RECORDS", str(tmp_path / "project"))
    train(Accelerator(cpu=True, project_dir=tmp_path / "project"), 30)
    monitor = services.find(RunMonitor)
    assert monitor is not None
    monkeypatch.setattr(monitor, "flush", lambda: None)
    shutil.rmtree(tmp_path / "project", ignore_errors=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not caplog.records
    assert not (tmp_path / "project").exists()


BLOCKS = """
import sys, time
import torch
from accelerate import Accelerator
from accelerate.monitoring import RecordThread, RecordWriter, records, run_monitor

def block(*args, **kwargs):
    time.sleep(1000)

case = sys.argv[2]
RecordThread.SECONDS_TO_END = 0.5
run_monitor.INTERVAL = 0.02
if case == "open":
    records.open = block
else:
    RecordWriter.write = block
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
if case == "failure":
    raise ValueError("the data is wrong")
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
for step in range(8):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
accelerator.end_training()
print("the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["failure", "open", "write"])
def test_a_process_ends_although_the_file_system_does_not_respond(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCKS, str(tmp_path), case]
    environ = {**os.environ, "ACCELERATE_RUN_RECORDS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert (done.returncode, done.stdout) == ((1, "") if case == "failure" else (0, "the end\n"))
    message = f"The last records of this run are not in {tmp_path}: the file system has not responded"
    assert done.stderr.count(message) == 1
