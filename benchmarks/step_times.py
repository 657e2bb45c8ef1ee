"""Cost of the step clock in the tiny step of `step.py`, and of all its calls in a step with a loader.

Rounds with the clock alternate with rounds of the same step without a call of the clock. The seconds of the
calls alone are compared with 1 % of a step of 0.4 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import torch

from accelerate.monitoring import StepClock
from accelerate.state import run_observers, step_clock
from pairing import Pair, report, time_round
from step import prepared

BUDGET = 1.05
CALLS_BUDGET = 4e-6
REPETITIONS, ROUNDS = 400, 200


def compare(work: str, step: Callable[[], None]) -> Pair:
    """Compares a step with the clock and without."""
    rounds = [(_time_without_clock(step), time_round(step, REPETITIONS)) for _ in range(ROUNDS)]
    ratio = median(ours / plain for plain, ours in rounds)
    plain, ours = (min(column) for column in zip(*rounds, strict=True))
    return Pair(work, plain, ours, ratio, BUDGET)


def _time_without_clock(step: Callable[[], None]) -> float:
    observers = run_observers()
    observers.remove(step_clock)
    try:
        return time_round(step, REPETITIONS)
    finally:
        observers.add(step_clock)


def measure_calls() -> Pair:
    """Measures all calls of the clock in a step that reads a batch from a loader."""
    clock, optimizer = StepClock(), SimpleNamespace(num_updates=0)

    def step() -> None:
        clock.batch_read(8)
        clock.before_backward(None, {})
        clock.after_backward()
        clock.before_step(optimizer)
        optimizer.num_updates += 1
        clock.after_step(optimizer, 1)
        clock.before_read()

    seconds = median(time_round(step, 10_000) for _ in range(50))
    return Pair("calls of the clock in a step", seconds, seconds, seconds, CALLS_BUDGET, "s")


def main() -> int:
    torch.set_num_threads(1)
    inputs = torch.randn(8, 16)
    pairs = [
        compare("tiny step", prepared(inputs)),
        compare("tiny step inside accumulate()", prepared(inputs, gradient_accumulation_steps=1)),
    ]
    for pair in pairs:
        print(f"{pair.work}: {100 * (pair.figure - 1):.2f} % of {1e6 * pair.raw:.1f} us")
    return report([*pairs, measure_calls()], "Clock of the step times")


if __name__ == "__main__":
    sys.exit(main())
