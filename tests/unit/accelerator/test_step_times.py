"""`Accelerator.step_times`: what real loops are counted as."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.state import AcceleratorState

pytestmark = pytest.mark.usefixtures("states")


class SlowData(Dataset[torch.Tensor]):
    """Samples that take a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
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
