"""The harness of `make chaos`: which attempts of processes that ended are steps, and what it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.run import confirm

RUN = Path(__file__).with_name("run.py")


def event(kind: str, step: int, num_members: int) -> dict[str, Any]:
    return {"event": kind, "step": step, "num_members": num_members}


@pytest.mark.parametrize(
    ("others", "num_members", "is_step"),
    [
        ([[event("attempt", 1, 2), event("step", 1, 2)]], 2, True),  # the other member took the step with it
        ([[event("attempt", 1, 1), event("step", 1, 1)]], 2, False),  # the step was repeated without it
        ([[event("attempt", 1, 2), event("step", 1, 2)]] * 2, 2, False),  # and with another one in its place
        ([[event("attempt", 1, 2)]], 2, False),  # no member took the step
    ],
)
def test_the_attempt_of_a_process_that_ended_is_a_step_if_a_member_is_missing(
    others: list[list[dict[str, Any]]], num_members: int, is_step: bool
) -> None:
    ended = [event("attempt", 0, 2), event("step", 0, 2), event("attempt", 1, num_members)]
    events = list(confirm([*others, ended]))
    assert all(each["event"] == "step" for each in events)
    assert sum(each["step"] == 1 for each in events) == is_step + sum(len(log) - 1 for log in others)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["replicas", "restart", "torchft"])
def test_each_mechanism_continues_after_a_failure(mechanism: str) -> None:
    pytest.importorskip("torchft")
    words = [sys.executable, str(RUN), "--failures", "1", "--replicas", "3", "--against", mechanism]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "next committed step after" in done.stdout
