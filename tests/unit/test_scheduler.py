"""AcceleratedScheduler: follows the real steps of the optimizer, at the pace that was chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.plugins import GradientAccumulationPlugin
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
    [(1, {}, 1), (4, {}, 4), (4, {"split_batches": True}, 1), (4, {"step_with_optimizer": "per_update"}, 1)],
)
def test_steps_per_update(processes: int, choices: dict[str, Any], expected: int) -> None:
    optimizer, scheduler = make(**choices)
    scheduler.num_processes = processes
    optimizer.step()
    scheduler.step()
    assert scheduler.scheduler.last_epoch == expected


def test_a_schedule_may_step_first_after_a_resume() -> None:
    optimizer, scheduler = make(step_with_optimizer=False)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()  # torch warns of a step before the first step of the optimizer
    assert scheduler.scheduler.last_epoch == 1


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
    assert f"schedule of 20 steps has ended, and training continues: {state}" in message
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


def test_the_state_is_that_of_the_inner_scheduler() -> None:
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


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Loop:
    """Training loop over a loader, of which a scheduler counts the updates as on several processes."""

    def __init__(
        self,
        build: Build,
        batches: int = 4,
        steps: int = 1,
        is_prepared: bool = True,
        keeps_iterator: bool = False,
        **choices: Any,
    ) -> None:
        plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **choices)
        self.model = torch.nn.Linear(1, 1)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        loader = DataLoader([torch.ones(1)] * batches)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.model, inner, build(inner))
        self.loader = self.accelerator.prepare(loader) if is_prepared else loader
        self.scheduler.num_processes = 2
        other = self.accelerator.prepare(DataLoader([torch.ones(1)] * 100))
        self.kept = iter(other) if keeps_iterator else None

    def update(self, batch: torch.Tensor, *, was_skipped: bool = False) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).sum())
            before = self.optimizer.num_updates
            self.optimizer.step()
            if was_skipped:  # as a scaler does
                self.optimizer.num_updates, self.optimizer._is_overflow = before, True
            self.optimizer.zero_grad()

    def epoch(self, first: int = 0, last: int | None = None, skipped: tuple[int, ...] = ()) -> None:
        for index, batch in enumerate(self.loader):
            if self.kept is not None:
                next(self.kept)
            if first <= index < (index + 1 if last is None else last):
                self.update(batch, was_skipped=index in skipped)

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def rates(self, epochs: int, *args: Any, **pass_choices: Any) -> list[float]:
        """Learning rate of each epoch, by a schedule that is called after each."""
        rates = []
        for _ in range(epochs):
            rates.append(self.rate)
            self.epoch(**pass_choices)
            self.scheduler.step(*args)
        return rates


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 2), halved(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    parts = [halved(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return torch.optim.lr_scheduler.ChainedScheduler(parts)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


def multiplied(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5)


class HalvedByMetric:
    """Scheduler of another library, with a metric by name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, metric: float | None = None) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def get_last_lr(self) -> list[float]:
        return [self.optimizer.param_groups[0]["lr"]]

    def state_dict(self) -> dict[str, Any]:
        return {}


STEADY = [1.0, 1.0, 0.5, 0.5]
EPOCHS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any], list[float]]] = {
    "StepLR": ({"build": halved}, (), {}, STEADY),
    "SequentialLR": ({"build": sequential}, (), {}, [1.0, 1.0, 1.0, 1.0]),
    "ChainedScheduler": ({"build": chained}, (), {}, [1.0, 0.5, 0.125, 0.0625]),
    "per update": ({"build": halved, "step_scheduler_with_optimizer": "per_update"}, (), {}, STEADY),
    "each call": ({"build": halved, "step_scheduler_with_optimizer": False}, (), {}, STEADY),
    "a loader that is not prepared": ({"build": halved, "is_prepared": False}, (), {}, STEADY),
    "an epoch of one update": ({"build": halved, "batches": 1}, (), {}, STEADY),
    "an iterator that is kept": ({"build": halved, "batches": 1, "keeps_iterator": True}, (), {}, STEADY),
    "an end inside a window": ({"build": halved, "steps": 3, "batches": 8}, (), {}, STEADY),
    "epochs of one window and a part": ({"build": halved, "steps": 4, "batches": 6}, (), {}, STEADY),
    "windows of several epochs": ({"build": halved, "steps": 4, "batches": 3}, (), {}, STEADY),
    "the last update skipped": ({"build": halved}, (), {"skipped": (3,)}, STEADY),
    "one update of two skipped": ({"build": halved, "batches": 2}, (), {"skipped": (0,)}, STEADY),
    "the last of two skipped": (
        {"build": halved, "batches": 2, "is_prepared": False},
        (),
        {"skipped": (1,)},
        STEADY,
    ),
    "all updates skipped": ({"build": halved, "batches": 2}, (), {"skipped": (0, 1)}, [1.0] * 4),
    "a metric": ({"build": plateau}, (1.0,), {}, [1.0, 1.0, 1.0, 0.5]),
    "a metric after one update": ({"build": plateau, "batches": 1}, (1.0,), {}, [1.0, 1.0, 1.0, 0.5]),
    "a metric that is an integer": ({"build": plateau}, (1,), {}, [1.0, 1.0, 1.0, 0.5]),
    "a metric inside a window": ({"build": plateau, "steps": 3}, (1.0,), {}, [1.0, 1.0, 1.0, 0.5]),
    "a metric after a skipped update": ({"build": plateau}, (1.0,), {"skipped": (3,)}, [1.0, 1.0, 1.0, 0.5]),
    "a metric of another library": ({"build": HalvedByMetric}, (1.0,), {}, [1.0, 0.5, 0.25, 0.125]),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # as in plain torch
def test_a_schedule_by_epoch_takes_one_step_at_the_end_of_each() -> None:
    failures = []
    for name, (choices, args, pass_choices, expected) in EPOCHS.items():
        reset()
        if (rates := Loop(**choices).rates(4, *args, **pass_choices)) != expected:
            failures.append((name, rates))
    assert not failures


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_an_explicit_epoch_is_one_step_also_in_accumulating_micro_batches() -> None:
    loop, rates = Loop(multiplied, batches=1), []
    for epoch in range(1, 4):
        loop.epoch()
        loop.scheduler.step(epoch)
        rates.append(loop.rate)
    assert rates == [0.5, 0.25, 0.125]
    reset()
    loop = Loop(lambda each: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(each, 2), steps=4)
    for index, batch in enumerate(loop.loader):
        loop.update(batch)
        loop.scheduler.step(epoch=index / 2)
        assert loop.rate == pytest.approx((1 + math.cos(math.pi * index / 4)) / 2)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # as in plain torch
def test_a_schedule_by_update_keeps_its_pace() -> None:
    """Calls in each micro-batch, in updates alone, before the update, and with evaluations."""
    expected = {"micro-batches": 8, "updates": 8, "before": 8, "evaluating": 8, "without loader": 8}
    taken = {}
    for name in expected:
        reset()
        loop = Loop(lambda each: torch.optim.lr_scheduler.ConstantLR(each, 1.0), steps=2)
        evaluation = loop.accelerator.prepare(DataLoader([torch.ones(1)] * 2))
        batches = [torch.ones(1)] * 4 if name == "without loader" else loop.loader
        for _ in range(2):
            for batch in batches:
                if name == "before":
                    loop.scheduler.step()
                loop.update(batch)
                if name in ("evaluating", "without loader"):
                    list(evaluation)
                if name != "before" and (name == "micro-batches" or loop.accelerator.sync_gradients):
                    loop.scheduler.step()
        taken[name] = loop.scheduler.scheduler.last_epoch
    assert taken == expected


def test_a_scheduler_of_several_optimizers_that_take_turns_steps_by_update() -> None:
    AcceleratorState(cpu=True, mixed_precision="no", _from_accelerator=True)
    optimizers = [
        AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)) for _ in range(2)
    ]
    inner = torch.optim.lr_scheduler.ConstantLR(optimizers[0].optimizer, 1.0)
    scheduler = AcceleratedScheduler(inner, optimizers)
    scheduler.num_processes = 2
    for _ in range(3):
        for _ in range(5):
            optimizers[1].step()
        optimizers[0].step()
        scheduler.step()
    assert inner.last_epoch == 6
    optimizers[1]._is_overflow = True
    scheduler.step()
    assert inner.last_epoch == 6
    optimizers[0].step()
    optimizers[1]._is_overflow = True
    scheduler.step()
    assert inner.last_epoch == 6


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("at", [1, 3])
def test_a_resumed_epoch_is_one_step(tmp_path: Path, is_prepared: bool, at: int) -> None:
    loop = Loop(halved, is_prepared=is_prepared)
    loop.rates(1)
    loop.epoch(last=at)
    loop.accelerator.save_state(tmp_path)
    reset()
    loop = Loop(halved, is_prepared=is_prepared)
    loop.accelerator.load_state(tmp_path)
    if is_prepared:
        loop.loader = loop.accelerator.skip_first_batches(loop.loader, at)
    loop.epoch(first=0 if is_prepared else at)
    loop.scheduler.step()
    assert loop.scheduler.scheduler.last_epoch == 2
    assert loop.rate == 0.5


def test_a_resumed_schedule_by_update_keeps_its_pace(tmp_path: Path) -> None:
    for is_old in (False, True):
        reset()
        loop = Loop(halved)
        for batch in loop.loader:
            loop.update(batch)
            loop.scheduler.step()
        if is_old:  # a checkpoint without the updates of calls
            loop.accelerator._runtime.prepared.schedulers[0].updates_at_call = []
        loop.accelerator.save_state(tmp_path / str(is_old))
        reset()
        loop = Loop(halved)
        loop.accelerator.load_state(tmp_path / str(is_old))
        loop.update(torch.ones(1))
        loop.scheduler.step()
        assert loop.scheduler.scheduler.last_epoch == 10


def test_schedules_by_epoch_give_no_warning_after_their_end(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 4))
    loop.rates(8)
    assert not caplog.messages


def test_a_scheduler_that_is_prepared_first_follows_its_own_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    own, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    other = accelerator.prepare_optimizer(other)
    scheduler = accelerator.prepare_scheduler(halved(own))
    own = accelerator.prepare_optimizer(own)
    assert scheduler.optimizers == [own]
    own._is_overflow = True
    other.step()
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 0


def test_evaluations_between_windows_of_data_that_is_not_prepared_add_no_step() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = DataLoader(torch.ones(4, 1))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for expected in (0.25, 0.0625, 0.015625):
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert scheduler.get_last_lr() == [expected]
        list(loader)
