"""What happens once in a run, in its records: saves that fail, loads, stops, hangs and recompilations."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from accelerate import Accelerator
from accelerate.accelerator.recording import RunSources
from accelerate.base import CheckpointError
from accelerate.checkpointing import saving
from accelerate.diagnostics.hang_report import HangReporter, Report
from accelerate.monitoring import Checkpoint, Conclusion, End, Event, Record, Start, find_records
from accelerate.monitoring.run_monitor import RunMonitor
from accelerate.state import AcceleratorState, record_event

pytestmark = pytest.mark.usefixtures("states")
Kind = TypeVar("Kind", bound=Record)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.monitoring.step_clock.INTERVAL", 0.05)
    monkeypatch.setattr("accelerate.monitoring.run_monitor.INTERVAL", 0.02)


def train(accelerator: Accelerator, steps: int, widths: tuple[int, ...] = (2,), **compiled: Any) -> None:
    """Train with batches of some widths in turn."""
    model: Any = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    model = torch.compile(model, **compiled) if compiled else model
    for step in range(steps):
        accelerator.backward(model(torch.ones(widths[step % len(widths)], 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


def end(folder: Path, kind: type[Kind]) -> list[Kind]:
    """End the run when its thread has begun to write, and return its records of a kind."""
    deadline = time.monotonic() + 30
    while not find_records(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(folder)
    return [record for record in records if isinstance(record, kind)]


def test_a_save_that_fails_is_recorded_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 10)
    monkeypatch.setattr(saving.Saver, "_commit_folder", commit)
    with pytest.raises(CheckpointError, match="No space left"):
        accelerator.save_state(tmp_path / "one")
    (save,) = end(tmp_path, Checkpoint)
    assert (save.event, save.path, save.step, save.size) == ("failed", str(tmp_path / "one"), 10, 0)
    assert "No space left on device" in save.text
    assert save.blocked == save.seconds > 0


def test_a_load_is_recorded_with_its_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 10)
    accelerator.save_state(tmp_path / "one")
    train(accelerator, 5)
    accelerator.free_memory()
    train(accelerator, 2)
    accelerator.load_state(tmp_path / "one")
    saved, loaded = end(tmp_path, Checkpoint)
    assert (saved.event, loaded.event) == ("committed", "loaded")
    assert (loaded.path, loaded.step) == (str(tmp_path / "one"), 10)


def test_a_stop_request_ends_the_run_as_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_STOP_FILE", str(tmp_path / "stop"))
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 10)
    (tmp_path / "stop").touch()
    deadline = time.monotonic() + 60
    while not accelerator.should_stop and time.monotonic() < deadline:
        time.sleep(0.01)
    accelerator.end_training()
    stop, warning, ended = [record for record in end(tmp_path, Record) if isinstance(record, (Event, End))]
    assert isinstance(stop, Event)
    assert isinstance(warning, Event)
    assert warning.name == "warning"
    assert (stop.name, stop.step) == ("stop", 10)
    assert "rank 0" in stop.text
    assert isinstance(ended, End)
    assert ended.how == "stopped"


def test_a_hang_is_recorded_with_its_report(tmp_path: Path) -> None:
    train(Accelerator(cpu=True, project_dir=tmp_path), 10)
    place = f"rank 1 (process 7 on {socket.gethostname()})"
    report = Report(f"{place} is missing", printer=0, aborts=False, num_answered=1, ended=[])
    HangReporter(0, 2, {}).publish(report)
    (hang,) = end(tmp_path, Event)
    assert (hang.name, hang.text, hang.step) == ("hang", "rank 1 (process 7) is missing", 10)


def test_recompilations_are_events_and_a_conclusion(tmp_path: Path) -> None:
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 30, widths=(2, 3, 4, 5, 6, 7), backend="eager", dynamic=False)
    torch._dynamo.reset()
    records = end(tmp_path, Record)
    events = [record for record in records if isinstance(record, Event)]
    assert {record.name for record in events} == {"recompilation"}
    assert sum(int(record.text.split()[3]) for record in events) == 5
    (conclusion,) = [record for record in records if isinstance(record, Conclusion)]
    assert conclusion.name == "recompilations"
    assert "compiled 5 times again" in conclusion.text


def test_a_run_that_is_reset_while_its_first_records_are_written_has_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    start, finish = RunSources.start, RunMonitor.finish

    def wait_and_start(sources: RunSources) -> Start:
        first = start(sources)
        begun.set()
        may_go_on.wait(30)
        return first

    def go_on_and_finish(monitor: RunMonitor, how: str) -> None:
        may_go_on.set()
        finish(monitor, how)

    monkeypatch.setattr(RunSources, "start", wait_and_start)
    monkeypatch.setattr(RunMonitor, "finish", go_on_and_finish)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, 10)
    assert begun.wait(30)
    record_event("warning", "something")
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(tmp_path)
    kinds = [type(record) for record in records]
    assert (kinds.count(Event), kinds.count(End)) == (1, 1)
