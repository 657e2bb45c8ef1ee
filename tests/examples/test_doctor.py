"""The slow runs of `examples/doctor`, unchanged: each is diagnosed by name, in its output and its records."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate.monitoring import Conclusion, find_records

FOLDER = Path(__file__).parents[2] / "examples" / "doctor"


def conclusions(project: Path) -> set[str]:
    """The names of all conclusions that rank 0 has recorded."""
    return {record.name for record in find_records(project)[0] if isinstance(record, Conclusion)}


def run_script(name: str, project: Path, *options: str) -> str:
    command = [sys.executable, str(FOLDER / name), "--project", str(project), *options]
    environ = {**os.environ, "ACCELERATE_STEP_TIMES": "yes"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def test_a_slow_loader_is_data_bound(tmp_path: Path) -> None:
    printed = run_script("slow_loader.py", tmp_path, "--samples", "840", "--milliseconds", "3")
    assert "data-bound: steps wait for data" in printed
    assert "num_workers (now 0)" in printed
    assert conclusions(tmp_path) == {"data-bound"}


@pytest.mark.slow
def test_a_fast_loader_is_healthy(tmp_path: Path) -> None:
    run_script("slow_loader.py", tmp_path, "--samples", "6000", "--milliseconds", "0")
    assert conclusions(tmp_path) == set()


@pytest.mark.slow
def test_blocking_saves_are_named(tmp_path: Path) -> None:
    printed = run_script("blocking_saves.py", tmp_path)
    assert "blocking saves: training waits for checkpoints" in printed
    assert conclusions(tmp_path) == {"blocking-saves"}


@pytest.mark.slow
def test_a_slow_rank_is_named(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    run_ranks(FOLDER / "slow_rank.py", "--project", str(tmp_path), "--steps", "200")
    assert conclusions(tmp_path) == {"straggler"}


@pytest.mark.slow
def test_equal_ranks_have_no_straggler(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    run_ranks(FOLDER / "slow_rank.py", "--project", str(tmp_path), "--slowdown", "0")
    assert "straggler" not in conclusions(tmp_path)
