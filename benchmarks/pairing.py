"""Time two ways of doing the same work in one run, and print how they compare.

Machines are noisy and their noise drifts, so the two ways take turns in short rounds, a ratio is the median
over neighbouring rounds, and what is counted is processor time, which other programs hardly add to.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

Work = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """One measured budget.

    Attributes:
        work: What was done.
        raw: Processor seconds for one repetition by hand, best round; or bytes.
        ours: Processor seconds for one repetition through the library, best round; or bytes.
        figure: What is held against the budget: a ratio, or seconds.
        budget: Largest figure that is accepted.
        unit: "x" for a ratio, "s" for seconds.
        measured: What `raw` and `ours` are: "s" for seconds, "B" for bytes, "n" for numbers.
    """

    work: str
    raw: float
    ours: float
    figure: float
    budget: float
    unit: str = "x"
    measured: str = "s"


def measure(work: str, raw: Work, ours: Work, *, budget: float, repetitions: int, rounds: int = 60) -> Pair:
    """Measure the ratio of two ways of doing the same.

    Args:
        work: What is done, for the table.
        raw: The work by hand.
        ours: The same work through the library.
        budget: Largest ratio that is accepted.
        repetitions: Calls in one round.
        rounds: How often both get their turn.
    """
    for way in (raw, ours):
        time_round(way, repetitions)
    pairs = [(time_round(raw, repetitions), time_round(ours, repetitions)) for _ in range(rounds)]
    ratio = median(second / first for first, second in pairs)
    best_raw, best_ours = (min(column) for column in zip(*pairs, strict=True))
    return Pair(work, best_raw, best_ours, ratio, budget)


def time_round(work: Work, repetitions: int) -> float:
    """Return processor seconds for one repetition, garbage collection left out."""
    gc.collect(0)
    gc.disable()
    try:
        start = time.process_time()
        for _ in range(repetitions):
            work()
        return (time.process_time() - start) / repetitions
    finally:
        gc.enable()


def spell(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _in_unit(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 1e6:.2f} MB"
    if unit == "n":
        return f"{value:,.0f}"
    return spell(value) if unit == "s" else f"{value:.2f} {unit}"


def report(pairs: Sequence[Pair], title: str) -> int:
    """Print a table, and write JSON where the command line asks for it.

    Returns:
        How many budgets were missed; the exit code of a benchmark.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    target = parser.parse_args().json
    width = max(len(pair.work) for pair in pairs)
    print(f"{title}\n{'work':{width}}  {'raw':>10}  {'ours':>10}  {'figure':>9}  budget")
    for pair in pairs:
        figure, budget = (_in_unit(value, pair.unit) for value in (pair.figure, pair.budget))
        verdict = "" if pair.figure <= pair.budget else "  MISSED"
        print(
            f"{pair.work:{width}}  {_in_unit(pair.raw, pair.measured):>10}  "
            f"{_in_unit(pair.ours, pair.measured):>10}  {figure:>9}  <= {budget}{verdict}"
        )
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps([asdict(pair) for pair in pairs], indent=2))
    return sum(pair.figure > pair.budget for pair in pairs)
