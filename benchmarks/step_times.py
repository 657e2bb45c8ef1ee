"""Cost of the step clock in the tiny step of `step.py`, and of all its calls in a step with a loader.

Rounds with the clock alternate with rounds of the same step without a call of the clock. The seconds of the
calls alone are compared with 1 % of a step of 0.4 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from accelerate.accelerator.measured import MeasuredBackward
from accelerate.monitoring import BACKWARD, DATA, StepClock
from accelerate.optimizer import AcceleratedOptimizer
from pairing import Pair, report, time_round
from step import prepared

BUDGET = 1.01
CALLS_BUDGET = 4e-6
REPETITIONS, ROUNDS = 400, 200

with_clock = AcceleratedOptimizer.step, MeasuredBackward.__call__


def step_without_clock(self: AcceleratedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Steps as an optimizer without a clock."""
    return self._step(closure) if self.gradient_state.sync_gradients else None


def backward_without_clock(self: MeasuredBackward, loss: torch.Tensor, **kwargs: Any) -> None:
    """Computes gradients without a clock."""
    self._strategy.backward(loss, **kwargs)


without_clock = step_without_clock, backward_without_clock


def compare(work: str, step: Callable[[], None]) -> Pair:
    """Compares a step with the clock and without."""
    rounds = [(_time(step, without_clock), _time(step, with_clock)) for _ in range(ROUNDS)]
    ratio = median(ours / plain for plain, ours in rounds)
    plain, ours = (min(column) for column in zip(*rounds, strict=True))
    return Pair(work, plain, ours, ratio, BUDGET)


def _time(step: Callable[[], None], methods: tuple[Any, Any]) -> float:
    AcceleratedOptimizer.step, MeasuredBackward.__call__ = methods  # type: ignore[method-assign]
    return time_round(step, REPETITIONS)


def measure_calls() -> Pair:
    """Measures all calls of the clock in a step that reads a batch from a loader."""
    clock = StepClock()
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        clock.begin_forward(8)
        clock.end_backward(clock.switch(BACKWARD), 0.0)
        clock.end_step(clock.begin_step(), 1, 1, number)
        clock.switch(DATA)

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
