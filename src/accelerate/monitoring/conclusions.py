"""From the times of steps to named conclusions, each with the figure behind it and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.monitoring.ranks import Straggler
from accelerate.monitoring.step_clock import StepTimes

DATA_BOUND, EXPOSED, SAVING = 0.2, 0.25, 0.1
"""The parts of the time from which on waiting for data, for other ranks and for saves is a conclusion."""
HOST_BOUND = 0.6
"""The part of the measured steps in which the device waited for kernels, from which on they are too small."""
RECOMPILATIONS = 3
FEWEST_STEPS = 5
"""Steps from which on there are conclusions."""


@dataclass(frozen=True)
class Finding:
    """One conclusion."""

    name: str
    text: str


@dataclass(frozen=True)
class RunFacts:
    """What conclusions are drawn from."""

    times: StepTimes
    world_size: int = 1
    num_workers: int | None = None  # of the loader that training reads; None where it is not known
    straggler: Straggler | None = None
    are_even: bool = True  # whether no rank is slow; False as long as this is not known
    saves: int = 0
    saves_in_background: int = 0  # of these
    recompilations: int = 0
    idle: float = 0.0  # part of the measured steps in which the device waited for kernels


def conclude(facts: RunFacts) -> list[Finding]:
    """Return the conclusions; none for a run in which nothing is wrong."""
    if facts.times.steps < FEWEST_STEPS:
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


def find_data_bound(facts: RunFacts) -> Finding | None:
    share = facts.times.shares["data"]
    if share < DATA_BOUND:
        return None
    workers = "" if facts.num_workers is None else f" (now {facts.num_workers})"
    return Finding(
        "data-bound",
        f"data-bound: steps wait for data {share:.0%} of the time. Raise num_workers{workers} and "
        "prefetch_factor of the DataLoader, or make reading a sample cheaper.",
    )


def find_straggler(facts: RunFacts) -> Finding | None:
    slow = facts.straggler
    if slow is None:
        return None
    return Finding(
        "straggler",
        f"straggler: rank {slow.rank} is {slow.slowdown:.0%} slower in its own compute since step "
        f"{slow.since}, and all ranks wait for it. Compare its machine, device clocks "
        "and data with those of the others.",
    )


def find_exposed_communication(facts: RunFacts) -> Finding | None:
    share = facts.times.shares["collectives"]
    if share < EXPOSED or facts.world_size == 1 or facts.straggler is not None or not facts.are_even:
        return None
    return Finding(
        "exposed-communication",
        f"exposed communication: steps wait for collectives {share:.0%} of the time. Change bucket_cap_mb of "
        "DistributedDataParallelKwargs, accumulate gradients over more batches, or compress them with a "
        "comm_hook.",
    )


def find_small_kernels(facts: RunFacts) -> Finding | None:
    if facts.idle < HOST_BOUND or facts.times.shares["data"] >= DATA_BOUND:
        return None
    return Finding(
        "small-kernels",
        f"small kernels: {facts.idle:.0%} of the time the device waits for the host, which "
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
    share = facts.times.shares["saving"]
    if share < SAVING:
        return None
    count = f" in {facts.saves} saves" if facts.saves else ""
    in_background = "blocking=False (ProjectConfiguration(async_save=True)), or less often"
    fix = "less often" if facts.saves_in_background > facts.saves / 2 else f"with {in_background}"
    text = f"blocking saves: training waits for checkpoints {share:.0%} of the time{count}. Save {fix}."
    return Finding("blocking-saves", text)
