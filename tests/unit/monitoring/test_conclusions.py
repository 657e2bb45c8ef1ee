"""Conclusions from the times of steps, by name and with a figure, and none for a healthy run."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.monitoring import PHASES, StepTimes
from accelerate.monitoring.conclusions import RunFacts, conclude
from accelerate.monitoring.rank_comparison import Straggler

HEALTHY = {
    "data": 2.0,
    "moving": 1.0,
    "forward": 30.0,
    "backward": 50.0,
    "collectives": 8.0,
    "optimizer": 6.0,
}


def times(
    steps: int = 100, evaluation: float = 0.0, waits: float | None = None, **seconds: float
) -> StepTimes:
    seconds_by = dict.fromkeys(PHASES, 0.0) | HEALTHY | seconds
    waits = seconds_by["data"] if waits is None else waits
    return StepTimes(steps, sum(seconds_by.values()), seconds_by, 0, waits, evaluation)


def facts_of(times: StepTimes, world_size: int = 1, **more: Any) -> RunFacts:
    return RunFacts(times, times, world_size, **more)


@pytest.mark.parametrize(
    ("facts", "name", "figure"),
    [
        (facts_of(times(data=145.5), num_workers=2), "data-bound", "60%"),
        (facts_of(times(data=145.5), num_workers=2), "data-bound", "num_workers (now 2)"),
        (facts_of(times(), 8, straggler=Straggler(3, 0.45, 120)), "straggler", "rank 3 is 45% slower"),
        (facts_of(times(), 8, straggler=Straggler(3, 0.45, 120)), "straggler", "since step 120"),
        (facts_of(times(collectives=89.0), 8), "exposed-communication", "50%"),
        (facts_of(times(), idle=0.75), "small-kernels", "75%"),
        (facts_of(times(), recompilations=4), "recompilations", "4 times"),
        (
            facts_of(times(saving=97.0), saves=5),
            "blocking-saves",
            "50% of the time in 5 saves. Save with block",
        ),
        (
            facts_of(times(saving=97.0), saves=5, saves_in_background=4),
            "blocking-saves",
            "50% of the time in 5 saves. Save less often.",
        ),
    ],
)
def test_each_cause_has_a_name_and_a_figure(facts: RunFacts, name: str, figure: str) -> None:
    (finding,) = conclude(facts)
    assert finding.name == name
    assert figure in finding.text


@pytest.mark.parametrize(
    "facts",
    [
        facts_of(times(), 8),
        facts_of(times(), 8, recompilations=2),
        facts_of(times(steps=2, data=145.5)),  # too few steps to say anything
        facts_of(times(data=145.5, waits=5.0)),  # one slow first batch, or the loader of an evaluation
        facts_of(times(data=2.0, waits=145.5)),  # the device computes while the host waits
        facts_of(times(saving=97.0), saves=1),  # one save at the end of a short run
        RunFacts(
            times(saving=97.0), times(steps=9000, forward=9000.0), saves=9
        ),  # one save in the last windows
        facts_of(times(collectives=89.0), 1),  # one rank waits for no other
        facts_of(times(collectives=89.0), 8, are_even=False),  # a rank may be slow
        facts_of(StepTimes()),
    ],
)
def test_a_healthy_run_has_none(facts: RunFacts) -> None:
    assert conclude(facts) == []


def test_waits_for_a_straggler_are_no_exposed_communication() -> None:
    facts = facts_of(times(collectives=89.0), 8, straggler=Straggler(3, 0.45, 120))
    assert [finding.name for finding in conclude(facts)] == ["straggler"]


def test_a_device_that_waits_for_data_has_no_small_kernels() -> None:
    facts = facts_of(times(data=145.5), idle=0.9)
    assert [finding.name for finding in conclude(facts)] == ["data-bound"]


def test_an_evaluation_does_not_hide_that_training_waits_for_data() -> None:
    facts = facts_of(times(data=145.5, evaluation=100.0, forward=130.0, waits=70.0))
    (finding,) = conclude(facts)
    assert finding.name == "data-bound"
