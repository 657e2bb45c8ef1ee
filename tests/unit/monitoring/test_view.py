"""The live view: what it shows of a run that starts, trains, restarts and ends."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from accelerate.monitoring import PHASES, RankStatus, RunView, render

NOW = 1000.0
SHARES = dict(zip(PHASES, (0.5, 0.0, 0.2, 0.2, 0.1, 0.0, 0.0, 0.0), strict=True))


def status(rank: int, **more: Any) -> RankStatus:
    fields: dict[str, Any] = {
        "world_size": 2,
        "time": NOW - 1,
        "pid": 10 + rank,
        "step": 1234,
        "seconds": 1.0,
        "seconds_by": SHARES,
        "steps_per_second": 20.5,
        "samples_per_second": 164.0,
        "memory": 2**30,
        "peak_memory": (2 + rank) * 2**30,
    }
    return RankStatus(rank=rank, **{**fields, **more})


def show(*statuses: RankStatus, num_ranks: int = 2, gone: tuple[int, ...] = (), width: int = 100) -> str:
    run = RunView("train.py", statuses, num_ranks, NOW - 90, NOW, lambda pid: pid not in gone)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(render(run))
    return console.export_text()


def row(text: str, rank: int) -> str:
    (line,) = re.findall(rf"^│ +{rank} .*$", text, re.MULTILINE)
    return str(line)


def test_it_shows_throughput_phases_memory_and_state() -> None:
    text = show(status(0, values={"loss": 0.25}), status(1))
    assert "0:01:30 · step 1,234 · 20.5 steps/s · 164 samples/s on each rank" in text
    assert "loss 0.25" in text
    assert "data 50%  ■ forward 20%  ■ backward 20%  ■ collectives 10%" in text
    assert text.count("█") == 72
    assert row(text, 1).split()[1:-1] == ["1", "1,234", "50%", "10%", "1.0", "GB", "3.0", "GB", "running"]
    assert "most memory: rank 1, 3.0 GB at its peak" in text


def test_ranks_that_have_written_nothing_are_starting() -> None:
    assert "2 of 2 ranks are starting" in show()
    assert "1 of 2 ranks are starting" in show(status(1))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"step": 0}, "before the first step"),
        ({"time": NOW - 40}, "no report for 40 s"),
        ({"ended": "failed"}, "failed"),
        ({"ended": "finished", "pid": 99}, "finished"),
        ({"pid": 99}, "ended"),
    ],
)
def test_the_state_of_a_rank(more: dict[str, Any], expected: str) -> None:
    assert row(show(status(0), status(1, **more), gone=(99,)), 1).rstrip(" │").endswith(f"GB  {expected}")


def test_after_a_restart_ranks_of_the_attempt_before_are_starting() -> None:
    text = show(status(0, attempt=2), status(1, attempt=1, ended="failed"))
    assert "2 restarts" in text
    assert "starting" in row(text, 1)


def test_it_shows_the_slowest_rank_of_all_machines() -> None:
    text = show(status(0, slowest=7, slowest_by=0.4, world_size=16), status(1))
    assert "slowest of 16 ranks: rank 7, 40% slower in its own work than the mean of the others" in text
    assert "slowest" not in show(status(0), status(1))


def test_the_end_of_the_epoch_is_shown_where_it_is_known() -> None:
    text = show(status(0, batch=50, num_batches=200, seconds_left=30.0))
    assert "epoch: batch 50 of 200, 30 s left" in text
    assert "epoch" not in show(status(0, batch=50))


def test_the_last_checkpoint_has_an_age() -> None:
    saved = status(1, last_checkpoint="runs/a/checkpoint_3", last_checkpoint_time=NOW - 12)
    assert "last checkpoint: runs/a/checkpoint_3, 12 s ago" in show(status(0), saved)


def test_each_conclusion_is_shown_once() -> None:
    slow = {"data-bound": "data-bound: steps wait for data 50% of the time."}
    text = show(status(0, conclusions=slow), status(1, conclusions={"data-bound": "another"}))
    assert "data-bound: steps wait for data 50% of the time." in text
    assert "another" not in text


def test_of_many_ranks_those_that_differ_are_shown() -> None:
    ranks = [status(rank, peak_memory=2**30, slowest=60) for rank in range(64)]
    ranks[40] = replace(ranks[40], peak_memory=2**32)
    ranks[50] = replace(ranks[50], ended="failed")
    text = show(*ranks, num_ranks=64)
    shown = [int(number) for number in re.findall(r"^│ +(\d+) +1,234", text, re.MULTILINE)]
    assert shown == [0, 1, 2, 3, 4, 40, 50, 60]
    assert "and 56 other ranks of this machine" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = show(
        status(0, last_checkpoint="/long" * 60), status(1, values={"loss": float("nan")}), width=width
    )
    assert max(len(line) for line in text.splitlines()) == width
