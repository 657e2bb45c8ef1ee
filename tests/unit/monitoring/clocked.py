"""Loaders and optimizers that a step clock observes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.monitoring import StepClock


class Loader:
    """A loader with so many workers."""

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers


class Optimizer:
    """An optimizer that counts its updates."""

    num_updates = 0


_optimizers = {number: Optimizer() for number in (7, 8)}


@contextmanager
def step(clock: StepClock, optimizer: int, number: int, updates: int = 1) -> Iterator[None]:
    """Takes the step with a number of the optimizer 7 or 8."""
    stepped = _optimizers[optimizer]
    clock.before_step(stepped)
    yield
    stepped.num_updates = number
    clock.after_step(stepped, updates)


def take_step(clock: StepClock, optimizer: int, number: int, updates: int = 1) -> None:
    """Takes a step in no time."""
    with step(clock, optimizer, number, updates):
        pass
