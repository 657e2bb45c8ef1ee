"""AcceleratedScheduler: follows the real steps of the optimizer, at the pace that was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState

pytestmark = pytest.mark.usefixtures("states")


def make(**choices: Any) -> tuple[AcceleratedOptimizer, AcceleratedScheduler]:
    AcceleratorState(cpu=True, mixed_precision="no", _from_accelerator=True)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    inner = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0 / (1 + step))
    return optimizer, AcceleratedScheduler(inner, optimizer, **choices)


@pytest.mark.parametrize(
    ("processes", "choices", "expected"),
    [
        (1, {}, 1),
        (4, {}, 4),
        (4, {"split_batches": True}, 1),
        (4, {"step_with_optimizer": "per_update"}, 1),
    ],
)
def test_steps_per_update(processes: int, choices: dict[str, Any], expected: int) -> None:
    optimizer, scheduler = make(**choices)
    scheduler.num_processes = processes
    optimizer.step()
    scheduler.step()
    assert scheduler.steps_per_update == expected
    assert scheduler.scheduler.last_epoch == expected


def test_waits_while_gradients_accumulate() -> None:
    optimizer, scheduler = make()
    GradientState()._set_sync_gradients(False)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def test_waits_when_the_optimizer_skipped_its_step() -> None:
    optimizer, scheduler = make()
    optimizer._is_overflow = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def test_steps_whenever_called_when_it_does_not_follow_the_optimizer() -> None:
    optimizer, scheduler = make(step_with_optimizer=False)
    optimizer.step()
    GradientState()._set_sync_gradients(False)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_a_metric_reaches_a_scheduler_that_does_not_follow_the_optimizer() -> None:
    optimizer, _ = make()
    inner = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=0, factor=0.1)
    scheduler = AcceleratedScheduler(inner, optimizer, step_with_optimizer=False)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_stops_at_the_end_of_a_schedule_that_has_one() -> None:
    AcceleratorState(cpu=True, mixed_precision="no", _from_accelerator=True)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    inner = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=5)
    scheduler = AcceleratedScheduler(inner, [optimizer])
    scheduler.num_processes = 4
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert inner.last_epoch == 5


Build = Callable[[torch.optim.Optimizer], Any]


def linear(optimizer: torch.optim.Optimizer) -> Any:
    """Warm-up for 4 steps, then down to 0 at step 20."""
    rate = lambda step: step / 4 if step < 4 else max(0, 20 - step) / 16  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.1)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)


def restarts(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step % 6) / 6)


def train(build: Build, updates: int, processes: int = 2, **choices: Any) -> None:
    AcceleratorState(cpu=True, mixed_precision="no", _from_accelerator=True)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    scheduler = AcceleratedScheduler(build(optimizer.optimizer), optimizer, **choices)
    scheduler.num_processes = processes
    for _ in range(updates):
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("build", "state"),
    [
        (linear, "all learning rates are 0"),
        (one_cycle, "its last step is over"),
        (cosine, "its last step is over"),
        (decay, "its last step is over"),
    ],
)
def test_a_schedule_that_ends_early_is_named_once(
    build: Build, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(build, 20)
    (message,) = caplog.messages
    assert f"schedule of 20 steps has ended, and training goes on: {state}" in message
    assert "steps 2 times per optimizer step, once for each of 2 processes" in message
    assert "steps in 11 optimizer steps" in message
    assert "step_scheduler_with_optimizer='per_update'" in message


@pytest.mark.parametrize("build", [linear, one_cycle, cosine, decay])
@pytest.mark.parametrize(
    ("updates", "processes", "choices"),
    [
        (10, 2, {}),
        (11, 2, {}),  # the last batches of epochs were filled up
        (5, 4, {}),
        (20, 1, {}),
        (40, 1, {}),
        (20, 2, {"step_with_optimizer": "per_update"}),
        (20, 2, {"split_batches": True}),
    ],
)
def test_a_schedule_of_the_right_length_gives_no_warning(
    build: Build, updates: int, processes: int, choices: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train(build, updates, processes, **choices)
    assert not caplog.messages


@pytest.mark.parametrize("build", [warm_up, restarts])
def test_a_schedule_without_an_end_gives_no_warning(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    train(build, 40)
    assert not caplog.messages


def test_state_passes_through() -> None:
    optimizer, scheduler = make()
    optimizer.step()
    scheduler.step()
    state = scheduler.state_dict()
    _, other = make()
    other.load_state_dict(state)
    assert other.scheduler.last_epoch == 1
    assert other.last_epoch == 1
    with pytest.warns(UserWarning, match="get_last_lr"):  # torch's own, on direct calls
        assert other.get_lr() == [0.5]


def test_a_metric_reaches_schedulers_that_take_one() -> None:
    optimizer, _ = make()
    inner = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=0, factor=0.1)
    scheduler = AcceleratedScheduler(inner, optimizer)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
