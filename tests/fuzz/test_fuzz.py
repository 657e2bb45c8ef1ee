"""A short range of the trials of `make fuzz`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("seeds", ["20:23", pytest.param("23:50", marks=pytest.mark.slow)])
def test_interrupted_runs_equal_those_without_a_break(seeds: str) -> None:
    run_trials("resume", seeds)


@pytest.mark.parametrize(
    "seeds",
    [
        "5:13,851:852",  # the last one has two backward passes in replica groups
        pytest.param("13:100,620:621", marks=pytest.mark.slow),  # the last one has a closure in them
    ],
)
def test_loops_on_several_ranks_equal_plain_torch(seeds: str) -> None:
    run_trials("loops", seeds)


@pytest.mark.parametrize(
    "seeds",
    [
        "1:2,12:13,85:86,2301:2302",  # a pipeline, shards, sequences, and a loss that one replica refuses
        pytest.param("100:160", marks=pytest.mark.slow),
    ],
)
def test_layouts_equal_one_process_or_are_refused(seeds: str) -> None:
    run_trials("axes", seeds)


@pytest.mark.slow
def test_launched_loops_whose_processes_are_killed_equal_undisturbed_ones() -> None:
    pytest.importorskip("torchft")
    run_trials("failures", "2:6")


def run_trials(kind: str, seeds: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--kind", kind, "--seeds", seeds]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
