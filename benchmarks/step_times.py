"""What the clock that counts the seconds of each phase costs in the tiny step of `step.py`.

The step is compared, in alternating rounds, with the same step without a call of the clock: its optimizer
steps as it would without one, and the hook of the backward pass is not set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import step_clock
from pairing import Pair, report, time_round
from step import prepared

BUDGET = 1.005
REPETITIONS, WARM_UP, ROUNDS = 400, 60, 200

with_clock = AcceleratedOptimizer.step


def without_clock(self: AcceleratedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Step as an optimizer that does not ask the clock."""
    if not self.gradient_state.sync_gradients:
        return None
    if self.scaler is not None or self.steps_in_backward:
        return self._step(closure)
    self.num_updates += 1
    return self.optimizer.step(closure)


def compare(work: str, step: Callable[[], None]) -> Pair:
    """Compare a step with the clock and without."""
    rounds: list[tuple[float, float]] = []
    for _ in range(WARM_UP * 50):  # until it is decided how many steps are measured
        step()
    for _ in range(ROUNDS):
        AcceleratedOptimizer.step = without_clock  # type: ignore[method-assign]
        step_clock._leave_out(0)
        plain = _time(step)
        AcceleratedOptimizer.step = with_clock  # type: ignore[method-assign]
        step_clock._measure()
        rounds.append((plain, _time(step)))
    ratio = median(ours / plain for plain, ours in rounds)
    plain, ours = (min(column) for column in zip(*rounds, strict=True))
    return Pair(work, plain, ours, ratio, BUDGET)


def _time(step: Callable[[], None]) -> float:
    for _ in range(WARM_UP):
        step()
    return time_round(step, REPETITIONS)


def main() -> int:
    torch.set_num_threads(1)
    inputs = torch.randn(8, 16)
    pairs = [
        compare("tiny step", prepared(inputs)),
        compare("tiny step inside accumulate()", prepared(inputs, gradient_accumulation_steps=1)),
    ]
    for pair in pairs:
        print(f"{pair.work}: {100 * (pair.figure - 1):.2f} % of {1e6 * pair.raw:.1f} us")
    return report(pairs, "Clock of the step times")


if __name__ == "__main__":
    sys.exit(main())
