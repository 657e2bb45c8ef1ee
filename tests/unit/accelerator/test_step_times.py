"""Times of real training loops by `Accelerator.step_times`, and their conclusions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.monitoring import Conclusion, RunMonitor, Window, find_records
from accelerate.state import AcceleratorState, services

pytestmark = pytest.mark.usefixtures("states")


class SlowData(Dataset[torch.Tensor]):
    """Samples that take a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.ones(4)


def train(accelerator: Accelerator, seconds: float = 0.0, rest: float = 0.0, **loader: Any) -> float:
    """Train for a pass over the data; the seconds that it took."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, DataLoader(SlowData(seconds), batch_size=4, **loader)
    )
    began = time.perf_counter()
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(rest)
    return time.perf_counter() - began


def test_phases_of_a_loop_add_up_to_its_time() -> None:
    accelerator = Accelerator(cpu=True)
    seconds = train(accelerator, seconds=0.005, rest=0.01)
    times = accelerator.step_times()
    assert times.steps == 8
    assert times.samples == 32
    assert times.seconds == pytest.approx(sum(times.seconds_by.values()))
    assert times.seconds == pytest.approx(seconds, rel=0.2)
    assert times.seconds_by["data"] >= 32 * 0.005
    assert times.seconds_by["rest"] >= 8 * 0.01
    assert min(times.seconds_by[name] for name in ("forward", "backward", "optimizer")) > 0


def test_accumulated_rounds_are_one_step() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    train(accelerator)
    assert accelerator.step_times().steps == 2


def test_a_dispatched_loader_counts_waits_and_samples() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.dispatch_batches = True
    train(accelerator, seconds=0.005)
    assert accelerator.step_times().seconds_by["data"] >= 8 * 0.005
    assert accelerator.step_times().samples == 32


def test_saves_are_counted(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    train(accelerator)
    before = accelerator.step_times().seconds_by["saving"]
    began = time.perf_counter()
    accelerator.save_state(tmp_path / "one")
    seconds = time.perf_counter() - began
    assert before == 0.0
    assert accelerator.step_times().seconds_by["saving"] == pytest.approx(seconds, rel=0.2)


def test_a_step_without_finite_gradients_is_not_counted() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer._attach_patched_step()
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.step_times().steps == 2


def test_a_new_run_begins_with_new_times() -> None:
    train(Accelerator(cpu=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True).step_times().steps == 0


def test_a_step_whose_closure_raises_is_not_counted() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def closure(is_broken: bool) -> torch.Tensor:
        loss = model(torch.ones(2, 4)).sum()
        accelerator.backward(loss)
        if is_broken:
            raise ValueError("broken batch")
        return loss

    optimizer.step(lambda: closure(False))
    with pytest.raises(ValueError, match="broken batch"):
        optimizer.step(lambda: closure(True))
    time.sleep(0.05)
    assert accelerator.step_times().steps == optimizer.num_updates == 1
    assert accelerator.step_times().seconds_by["rest"] > 0.04


def test_no_attribute_of_the_strategy_changes_while_it_trains() -> None:
    accelerator = Accelerator(cpu=True)
    strategy = accelerator._runtime.strategy
    before = dict(vars(strategy))
    train(accelerator)
    assert all(value is before[name] for name, value in vars(strategy).items())


def conclusions_of(folder: Path) -> list[str]:
    """Ends the run, and returns the names of its conclusions."""
    monitor = services.find(RunMonitor)
    assert monitor is not None
    monitor.finish("finished")
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(folder)
    return [record.name for record in records if isinstance(record, Conclusion)]


class SlowStart(SlowData):
    """Samples of which the first one takes long."""

    is_started = False

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.is_started:
            self.is_started = True
            time.sleep(1.0)
        return torch.ones(4)


@pytest.mark.slow
def test_a_slow_first_batch_is_no_conclusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.monitoring.step_clock.INTERVAL", 0.05)
    monkeypatch.setattr("accelerate.monitoring.run_monitor.INTERVAL", 0.02)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(SlowStart(0.0), batch_size=4)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )
    for batch in batches:
        time.sleep(0.2)
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert accelerator.step_times().shares["data"] > 0.2
    assert conclusions_of(tmp_path) == []


def test_a_slow_loader_of_training_is_a_conclusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.monitoring.step_clock.INTERVAL", 0.05)
    monkeypatch.setattr("accelerate.monitoring.run_monitor.INTERVAL", 0.02)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    for _ in range(2):
        train(accelerator, seconds=0.01, rest=0.01)
    assert conclusions_of(tmp_path) == ["data-bound"]
    (records,) = find_records(tmp_path)
    windows = [record for record in records if isinstance(record, Window)]
    assert windows[-1].conclusions == ["data-bound"]
