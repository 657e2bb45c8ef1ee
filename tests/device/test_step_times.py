"""Where the time of steps goes on a device that computes asynchronously, as its events say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.simulated_device import sim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.monitoring import Conclusion, RunTimes, find_records
from accelerate.state import AcceleratorState, step_clock

pytestmark = pytest.mark.usefixtures("states")
KERNELS = 60
"""Further kernels of a slow forward pass; the backward pass and the step of an optimizer launch a few."""


class Net(nn.Module):
    """Launches many kernels in its forward pass, and maybe waits for them at the end."""

    def __init__(self, kernels: int = KERNELS, waits: bool = False) -> None:
        super().__init__()
        self.layer, self.kernels, self.waits = nn.Linear(4, 1), kernels, waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(self.kernels):
                x = x.neg()
        loss = self.layer(x).sum()
        if self.waits:
            loss.item()
        return loss


class Slow(torch.autograd.Function):
    """The host is slow to launch what follows, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return gradient.clone()


class SlowSGD(torch.optim.SGD):
    """The host is slow to launch the update, so a device that computes no longer is seen at its end."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.03)
        return super().step(closure)


class LaunchBound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = Slow.apply(self.layer(x))
        return x.sum()


def train(
    accelerator: Accelerator,
    net: nn.Module,
    steps: int,
    waits: bool = False,
    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> None:
    loader = DataLoader(TensorDataset(torch.randn(2 * steps, 4)), batch_size=2)
    net, optimizer, loader = accelerator.prepare(net, optimizer_class(net.parameters(), lr=0.1), loader)
    for (batch,) in loader:
        loss = net(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if waits:
            loss.item()


def read_times(accelerator: Accelerator) -> RunTimes:
    accelerator.step_times()  # ends what is measured with an event, which is done when the devices are
    sim.synchronize()
    times = accelerator.step_times()
    assert sum(times.seconds_by.values()) == pytest.approx(times.seconds)
    assert min(times.seconds_by.values()) >= 0
    return times


@pytest.mark.parametrize("in_step", [False, True])
def test_slow_kernels_of_a_forward_pass_are_forward_wherever_the_host_waits(in_step: bool) -> None:
    accelerator = Accelerator()
    with sim.delayed(0.003):
        train(accelerator, Net(), 6, waits=in_step)
        times = read_times(accelerator)
    assert times.steps == 6
    assert times.shares["forward"] > 0.5
    assert times.shares["rest"] < 0.2
    assert step_clock.idle == 0.0


def test_a_device_that_computes_while_the_host_waits_in_a_forward_pass_is_not_idle() -> None:
    accelerator = Accelerator()
    with sim.delayed(0.003):
        train(accelerator, Net(waits=True), 6)
        read_times(accelerator)
    assert step_clock.idle == 0.0


def test_the_host_waits_for_no_event() -> None:
    accelerator = Accelerator()
    net = nn.Linear(4, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = torch.ones(2, 4, device=accelerator.device)
    with sim.delayed(0.2):
        for _ in range(3):
            accelerator.backward(net(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        last = torch.Event(accelerator.device)
        last.record()
        assert not last.query()
        times = read_times(accelerator)
    assert times.shares["backward"] > 0.2


def test_a_device_that_waits_for_kernels_gives_the_conclusion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.monitoring.step_clock.INTERVAL", 0.05)
    monkeypatch.setattr("accelerate.monitoring.device_clock.SMALL_PART", 0.5)  # threads of a busy machine lag
    accelerator = Accelerator(project_dir=tmp_path)
    train(accelerator, LaunchBound(), 12, optimizer_class=SlowSGD)
    read_times(accelerator)
    AcceleratorState._reset_state(reset_partial_state=True)
    (records,) = find_records(tmp_path)
    found = [record for record in records if isinstance(record, Conclusion)]
    assert [record.name for record in found] == ["small-kernels"]
    assert "the device waits for the host" in found[0].text


def wait_for_the_other_rank() -> dict[str, float]:
    """Train where rank 1 computes much longer than rank 0."""
    accelerator = Accelerator()
    with sim.delayed(0.003):
        train(accelerator, Net(kernels=KERNELS * accelerator.process_index), 6)
        return read_times(accelerator).shares


def test_a_device_that_waits_for_another_rank_in_the_backward_pass_is_in_a_collective(run: Any) -> None:
    fast, slow = run(wait_for_the_other_rank, processes=2, env={"ACCELERATE_USE_CPU": None})
    assert fast["collectives"] > 0.4 > slow["collectives"]
    assert slow["forward"] > 0.4 > fast["forward"]
