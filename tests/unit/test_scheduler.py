"""AcceleratedScheduler: follows the real steps of the optimizer, at the pace that was chosen."""

from __future__ import annotations

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


def test_waits_when_the_optimizer_left_out_its_step() -> None:
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
