"""Order and end of the calls of observers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.state import Observers, run_observers, step_clock

pytestmark = pytest.mark.usefixtures("states")


class Inner:
    """Notes the events of a backward pass in a list."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def before_backward(self, loss: Any, arguments: Any) -> None:
        self.calls.append(f"before {self.name}")

    def after_backward(self) -> None:
        self.calls.append(f"after {self.name}")


def call(observers: Observers, calls: list[str]) -> list[str]:
    """Returns the calls of one backward pass."""
    calls.clear()
    observers.before_backward(None, {})
    observers.after_backward()
    return list(calls)


def test_later_observers_surround_a_backward_pass_of_earlier_ones() -> None:
    calls: list[str] = []
    observers = Observers([Inner(calls, "first"), Inner(calls, "second")])
    assert call(observers, calls) == ["before second", "before first", "after first", "after second"]


def test_an_observer_is_called_only_at_the_events_that_it_has_methods_for() -> None:
    observers = Observers([Inner([], "one")])
    assert observers.before_step is observers.before_read is Observers().before_step


def test_a_removed_or_replaced_observer_is_not_called() -> None:
    calls: list[str] = []
    first, second = Inner(calls, "first"), Inner(calls, "second")
    observers = Observers([first])
    observers.put(second)
    assert call(observers, calls) == ["before second", "after second"]
    observers.remove(second)
    assert call(observers, calls) == []
    assert observers.all == ()


def test_batches_that_are_read_ahead_are_not_used() -> None:
    used: list[Any] = []

    class Used:
        def before_read(self, loader: Any) -> None:
            if not run_observers().is_ahead:
                used.append(loader)

    loader: Any = Accelerator(cpu=True).prepare(DataLoader([1, 2, 3, 4]))
    run_observers().add(Used())
    batches = iter(loader)
    next(batches)
    with run_observers().reading_ahead():
        next(batches)
    assert used == []
    next(batches)
    assert used == [loader]


def test_a_run_calls_its_observers_at_all_events() -> None:
    events: list[str] = []

    class All:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: events.append(name)

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(4, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run_observers().add(All())
    for batch in loader:
        accelerator.backward(model(batch).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    step = ["batch_read", "loss_computed", "before_backward", "after_backward", "norm_computed"]
    step += ["before_step", "after_step", "before_read"]
    assert events == ["pass_begun", *step, *step, "pass_ended"]


def test_the_clock_observes_each_run() -> None:
    first = run_observers()
    assert first.all[0] is step_clock
    Accelerator(cpu=True)
    assert run_observers() is first
    assert sum(observer is step_clock for observer in first.all) == 1


class RunEvents:
    """Notes the events of a run outside of its steps."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def prepared(self) -> None:
        self.calls.append("prepared")

    def before_save(self) -> None:
        self.calls.append("before_save")

    def awaited(self) -> None:
        self.calls.append("awaited")

    def loaded(self, updates: int) -> None:
        self.calls.append(("loaded", updates))

    def ended(self) -> None:
        self.calls.append("ended")


def test_saves_loads_and_the_end_of_a_run_are_events(tmp_path: Path) -> None:
    accelerator, events = Accelerator(cpu=True), RunEvents()
    run_observers().add(events)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    accelerator.end_training()
    assert events.calls == ["prepared", "before_save", ("loaded", 1), "awaited", "ended"]


class StateEvents:
    """Notes the events of state dicts of an optimizer."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def before_state_dict(self) -> None:
        self.calls.append("before_state_dict")

    def before_load(self, state: Any) -> None:
        self.calls.append(("before_load", sorted(state)))

    def after_load(self) -> None:
        self.calls.append("after_load")


def test_state_dicts_of_an_optimizer_are_events() -> None:
    accelerator, events = Accelerator(cpu=True), StateEvents()
    optimizer: Any = accelerator.prepare(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    optimizer.observers = (events,)
    optimizer.load_state_dict(optimizer.state_dict())
    assert events.calls == ["before_state_dict", ("before_load", ["param_groups", "state"]), "after_load"]
