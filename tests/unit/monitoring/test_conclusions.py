"""Conclusions from times of steps: each by name, with its figure, and none for a healthy run."""

from __future__ import annotations

import pytest

from accelerate.monitoring import PHASES, RunFacts, StepTimes, Straggler, conclude

HEALTHY = {
    "data": 2.0,
    "moving": 1.0,
    "forward": 30.0,
    "backward": 50.0,
    "collectives": 8.0,
    "optimizer": 6.0,
}


def times(steps: int = 100, **seconds: float) -> StepTimes:
    seconds_by = dict.fromkeys(PHASES, 0.0) | HEALTHY | seconds
    return StepTimes(steps, sum(seconds_by.values()), seconds_by, 0)


@pytest.mark.parametrize(
    ("facts", "name", "figure"),
    [
        (RunFacts(times(data=145.5), num_workers=2), "data-bound", "60%"),
        (RunFacts(times(data=145.5), num_workers=2), "data-bound", "num_workers (now 2)"),
        (RunFacts(times(), 8, straggler=Straggler(3, 0.45, 120)), "straggler", "rank 3 is 45% slower"),
        (RunFacts(times(), 8, straggler=Straggler(3, 0.45, 120)), "straggler", "since step 120"),
        (RunFacts(times(collectives=89.0), 8), "exposed-communication", "50%"),
        (RunFacts(times(), idle=0.75), "small-kernels", "75%"),
        (RunFacts(times(), recompilations=4), "recompilations", "4 times"),
        (
            RunFacts(times(saving=97.0), saves=5),
            "blocking-saves",
            "50% of the time in 5 saves. Save with block",
        ),
        (
            RunFacts(times(saving=97.0), saves=5, saves_in_background=4),
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
        RunFacts(times(), 8),
        RunFacts(times(), 8, recompilations=2),
        RunFacts(times(steps=2, data=145.5)),  # too few steps to say anything
        RunFacts(times(collectives=89.0), 1),  # one rank waits for no other
        RunFacts(times(collectives=89.0), 8, are_even=False),  # a rank may be slow
        RunFacts(StepTimes()),
    ],
)
def test_a_healthy_run_has_none(facts: RunFacts) -> None:
    assert conclude(facts) == []


def test_waits_for_a_straggler_are_no_exposed_communication() -> None:
    facts = RunFacts(times(collectives=89.0), 8, straggler=Straggler(3, 0.45, 120))
    assert [finding.name for finding in conclude(facts)] == ["straggler"]


def test_a_device_that_waits_for_data_has_no_small_kernels() -> None:
    facts = RunFacts(times(data=145.5), idle=0.9)
    assert [finding.name for finding in conclude(facts)] == ["data-bound"]
