"""Which plans are recorded, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.launch import (
    ENTRY,
    FOLDER_VARIABLE,
    VERBOSE_VARIABLE,
    LaunchPlan,
    Rendezvous,
    Target,
    folder_of,
    record_failures,
)


def make_plan(target: Target, launcher: str = "local", **meeting: str) -> LaunchPlan:
    return LaunchPlan(
        launcher=launcher,
        target=target,
        processes=1,
        machines=1,
        machine=0,
        rendezvous=Rendezvous(**meeting),  # type: ignore[arg-type]
        environment={"A": "b"},
    )


def test_scripts_and_modules_are_started_by_the_entry() -> None:
    plan = record_failures(make_plan(Target("script", "train.py", ("--lr", "1"))), Path("here"))
    assert plan.target == Target("script", str(ENTRY), ("train.py", "--lr", "1"))
    assert plan.environment == {"A": "b", FOLDER_VARIABLE: "here"}
    module = record_failures(make_plan(Target("module", "pkg.train", ("x",)), "elastic"), Path("here"))
    assert module.target.arguments == ("-m", "pkg.train", "x")


@pytest.mark.parametrize(
    ("kind", "launcher"), [("program", "local"), ("script", "mpi"), ("script", "sagemaker")]
)
def test_what_cannot_be_recorded_is_left_alone(kind: str, launcher: str) -> None:
    plan = make_plan(Target(kind, "x"), launcher)  # type: ignore[arg-type]
    assert record_failures(plan, Path("here")) is plan


def test_kept_logs_hold_whole_tracebacks() -> None:
    for meeting in ({"log_dir": "logs"}, {"tee": "3"}):
        plan = record_failures(make_plan(Target("script", "x"), **meeting), Path("here"))
        assert plan.environment[VERBOSE_VARIABLE] == "1"


def test_the_folder_is_that_of_a_recorded_plan() -> None:
    plan = make_plan(Target("script", "x"))
    assert folder_of(record_failures(plan, Path("here"))) == Path("here")
    assert folder_of(plan) is None
