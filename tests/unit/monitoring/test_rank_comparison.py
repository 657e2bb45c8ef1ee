"""Summaries of ranks in a tree, and which rank is slow for long."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from accelerate.monitoring import PHASES, StepTimes
from accelerate.monitoring.rank_comparison import (
    Comparisons,
    ComputeSummary,
    Straggler,
    children_of,
    join_summaries,
    summarize_rank,
)


def times(seconds: float, waiting: float = 0.0) -> StepTimes:
    parts = dict.fromkeys(PHASES, 0.0) | {"backward": seconds * 10, "collectives": waiting * 10}
    return StepTimes(10, sum(parts.values()), parts, 0)


def summarize(seconds: list[float], rank: int = 0, step: int = 7) -> ComputeSummary:
    """The summary that reaches a rank, through all ranks below it."""
    below = [summarize(seconds, child, step) for child in children_of(rank, len(seconds))]
    return join_summaries(summarize_rank(rank, 1, step, times(seconds[rank], waiting=1.0)), below)


@pytest.mark.parametrize("size", [1, 2, 17, 18, 300, 4096])
def test_each_rank_but_the_first_has_one_parent(size: int) -> None:
    children = [child for rank in range(size) for child in children_of(rank, size)]
    assert children == list(range(1, size))
    assert max(len(children_of(rank, size)) for rank in range(size)) <= 16


@pytest.mark.parametrize("size", [1, 2, 40, 4096])
def test_the_tree_gives_what_all_ranks_together_have(size: int) -> None:
    seconds = [random.Random(size + rank).uniform(0.1, 0.2) for rank in range(size)]
    summary = summarize(seconds)
    assert summary.ranks == size
    assert summary.total == pytest.approx(sum(seconds))
    assert (summary.least, summary.most) == pytest.approx((min(seconds), max(seconds)))
    assert summary.slowest == sorted(range(size), key=lambda rank: -seconds[rank])[:8]


def test_a_rank_that_stays_slow_is_a_straggler_since_it_became_slow() -> None:
    comparisons = Comparisons()
    comparisons.add(summarize([0.1, 0.1, 0.1, 0.1], step=10))
    for step in (20, 30):
        assert comparisons.add(summarize([0.1, 0.1, 0.15, 0.1], step=step)) == {2: pytest.approx(0.5)}
        assert comparisons.straggler() is None
    comparisons.add(summarize([0.1, 0.1, 0.15, 0.1], step=40))
    assert comparisons.straggler() == Straggler(2, pytest.approx(0.5), 20)
    comparisons.add(summarize([0.1, 0.1, 0.1, 0.1], step=50))
    assert comparisons.straggler() is None


def test_a_rank_that_is_slow_at_times_is_no_straggler() -> None:
    comparisons = Comparisons()
    for step in range(20):
        comparisons.add(summarize([0.1, 0.2 if step % 2 else 0.1], step=step))
        assert comparisons.straggler() is None


def test_ranks_are_even_after_comparisons_without_a_slow_one() -> None:
    comparisons = Comparisons()
    known = []
    for seconds in ([0.1, 0.1], [0.1, 0.1], [0.1, 0.1], [0.1, 0.2]):
        comparisons.add(summarize(seconds))
        known.append(comparisons.are_even())
    assert known == [False, False, True, False]


def test_ranks_without_steps_are_not_slow() -> None:
    empty = replace(summarize([0.0, 0.0]), total=0.0)
    assert Comparisons().add(empty) == {}
