"""Measure what `Accelerator.log` costs: its own time, and steps beside a tracker of 20 ms.

python benchmarks/tracking.py [--json FILE]
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from pairing import Pair, report

STEPS = 40
STEP_SECONDS = 0.025  # of a training step: more than the tracker takes, so that its queue stays short
TRACKER_SECONDS = 0.02
CALLS = 1000


class Slow(GeneralTracker):
    """Takes its time for each call, as a server far away does."""

    name, requires_logging_directory, blocks = "slow", False, True

    @property
    def tracker(self) -> None:
        """There is no library."""
        return

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Wait."""
        time.sleep(TRACKER_SECONDS)


class Empty(Slow):
    """Takes no time, in the thread of the caller."""

    blocks = False

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Do nothing."""


class EmptyInThread(Empty):
    """Takes no time, in a thread."""

    blocks = True


def seconds_of_steps(accelerator: Accelerator | None) -> float:
    """Return the wall time of a step that waits for its device, with or without a call of `log`."""
    times = []
    for step in range(STEPS):
        start = time.perf_counter()
        time.sleep(STEP_SECONDS)
        if accelerator is not None:
            accelerator.log({"loss": 1.0, "lr": 0.1}, step=step)
        times.append(time.perf_counter() - start)
    return median(times)


def seconds_of_log(tracker: GeneralTracker, values: dict[str, Any]) -> float:
    """Return the wall time of one call, the best of ten rounds."""
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("benchmark")
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for step in range(CALLS):
            accelerator.log(values, step=step)
        best = min(best, (time.perf_counter() - start) / CALLS)
        accelerator.trackers  # noqa: B018  # waits until all are sent
    accelerator.trackers.clear()
    return best


def main() -> int:
    """Measure, print a table, and return how many budgets were missed."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, log_with=Slow())
    accelerator.init_trackers("benchmark")
    raw, ours = seconds_of_steps(None), seconds_of_steps(accelerator)
    accelerator.trackers.clear()
    numbers, tensors = {"loss": 1.0, "lr": 0.1}, {"loss": torch.tensor(1.0), "lr": 0.1}
    pairs = [Pair("a step beside a tracker of 20 ms", raw, ours, ours / raw, 1.05)]
    for work, tracker, values, budget in (
        ("log, at once", Empty(), numbers, 20e-6),
        ("log, in a thread", EmptyInThread(), numbers, 60e-6),
        ("log, in a thread, a tensor", EmptyInThread(), tensors, 100e-6),
    ):
        seconds = seconds_of_log(tracker, values)
        pairs.append(Pair(work, 0.0, seconds, seconds, budget, "s"))
    return report(pairs, "Tracking")


if __name__ == "__main__":
    sys.exit(main())
