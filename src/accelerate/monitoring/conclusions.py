"""Conclusions about the speed of a run, each with a name, a figure and a change that helps.

`run_monitor.py` draws them from the last windows of steps, and at the end of a run from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.monitoring.rank_comparison import Straggler
from accelerate.monitoring.step_clock import StepTimes

DATA_BOUND, EXPOSED, BLOCKING = 0.2, 0.25, 0.1
"""Minimum parts of the time that steps wait for data, other ranks and saves."""
HOST_BOUND = 0.6
"""Minimum part of the steps in which the device waits for kernels."""
RECOMPILATIONS = 3
MIN_STEPS = 5
MIN_SAVES = 2
"""Number of saves from which the time between saves is known."""


@dataclass(frozen=True)
class Finding:
    """Conclusion about a run."""

    name: str
    text: str


@dataclass(frozen=True)
class RunFacts:
    """Measurements from which conclusions are drawn."""

    times: StepTimes  # of the recent steps
    run: StepTimes  # of all steps
    world_size: int = 1
    num_workers: int | None = None  # of the loader that training reads, or None if it is not known
    straggler: Straggler | None = None
    are_even: bool = True  # whether no rank is slow, or False as long as this is not known
    saves: int = 0
    saves_in_background: int = 0
    recompilations: int = 0
    idle: float = 0.0  # part of the steps in which the device waited for kernels


def conclude(facts: RunFacts) -> list[Finding]:
    """Returns the conclusions, of which a healthy run has none."""
    if facts.times.steps < MIN_STEPS:
        return []
    found = [
        find_data_bound(facts),
        find_straggler(facts),
        find_exposed_communication(facts),
        find_small_kernels(facts),
        find_recompilations(facts),
        find_blocking_saves(facts),
    ]
    return [finding for finding in found if finding is not None]


def data_fraction(times: StepTimes) -> float:
    """Returns the part of the training time in which steps wait for data.

    A device that is behind the host computes while the host waits, so the smaller time of both counts.
    """
    seconds = times.seconds - times.evaluation
    return min(times.waits, times.seconds_by["data"]) / seconds if seconds > 0 else 0.0


def find_data_bound(facts: RunFacts) -> Finding | None:
    fraction = data_fraction(facts.times)
    if fraction < DATA_BOUND:
        return None
    workers = "" if facts.num_workers is None else f" (now {facts.num_workers})"
    return Finding(
        "data-bound",
        f"data-bound: steps wait for data {fraction:.0%} of the time. Raise num_workers{workers} and "
        "prefetch_factor of the DataLoader, or make reading a sample cheaper.",
    )


def find_straggler(facts: RunFacts) -> Finding | None:
    slow = facts.straggler
    if slow is None:
        return None
    return Finding(
        "straggler",
        f"straggler: rank {slow.rank} is {slow.slowdown:.0%} slower in its own compute since step "
        f"{slow.since}, and all ranks wait for it. Compare its node, device clocks "
        "and data with those of the others.",
    )


def find_exposed_communication(facts: RunFacts) -> Finding | None:
    fraction = facts.times.shares["collectives"]
    if fraction < EXPOSED or facts.world_size == 1 or facts.straggler is not None or not facts.are_even:
        return None
    return Finding(
        "exposed-communication",
        f"exposed communication: steps wait for collectives {fraction:.0%} of the time. Change bucket_cap_mb "
        "of DistributedDataParallelKwargs, accumulate gradients over more batches, or compress them with a "
        "comm_hook.",
    )


def find_small_kernels(facts: RunFacts) -> Finding | None:
    if facts.idle < HOST_BOUND or data_fraction(facts.times) >= DATA_BOUND:
        return None
    return Finding(
        "small-kernels",
        f"small kernels: in {facts.idle:.0%} of the steps the device waits for the host, which "
        "launches kernels too slowly. Use a larger batch, or compile the model (dynamo_backend).",
    )


def find_recompilations(facts: RunFacts) -> Finding | None:
    if facts.recompilations < RECOMPILATIONS:
        return None
    return Finding(
        "recompilations",
        f"recompilations: torch.compile has compiled {facts.recompilations} times again. Pad batches to "
        "equal shapes, or use dynamic=True; TORCH_LOGS=recompiles prints the causes.",
    )


def find_blocking_saves(facts: RunFacts) -> Finding | None:
    fraction = facts.run.shares["saving"]
    if fraction < BLOCKING or facts.saves < MIN_SAVES:
        return None
    in_background = "blocking=False (ProjectConfiguration(async_save=True)), or less often"
    fix = "less often" if facts.saves_in_background > facts.saves / 2 else f"with {in_background}"
    return Finding(
        "blocking-saves",
        f"blocking saves: training waits for checkpoints {fraction:.0%} of the time in {facts.saves} saves. "
        f"Save {fix}.",
    )
