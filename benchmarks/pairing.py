"""Time two ways of doing the same work in one run, and print their ratio.

Machines are noisy and their noise drifts, so the two ways take turns in short rounds, each is judged by its best
round, and what is counted is the time of the processor, which other programs do not add to.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Work = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """One measured budget.

    Attributes:
        work: What was done.
        raw: Processor seconds for one repetition by hand.
        ours: Processor seconds for one repetition through the library.
        budget: Largest ratio that is accepted.
    """

    work: str
    raw: float
    ours: float
    budget: float

    @property
    def ratio(self) -> float:
        """How much longer the library takes."""
        return self.ours / self.raw


def time_rounds(raw: Work, ours: Work, repetitions: int, rounds: int) -> tuple[float, float]:
    """Return the best seconds for one repetition of each, taken in turns.

    Args:
        raw: The work by hand.
        ours: The same work through the library.
        repetitions: Calls in one round.
        rounds: How often both get their turn.
    """
    best = [float("inf"), float("inf")]
    for work in (raw, ours):
        for _ in range(max(repetitions // 5, 1)):
            work()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            order = ((0, raw), (1, ours)) if turn % 2 else ((1, ours), (0, raw))
            for place, work in order:
                start = time.process_time()
                for _ in range(repetitions):
                    work()
                best[place] = min(best[place], (time.process_time() - start) / repetitions)
    finally:
        gc.enable()
    return best[0], best[1]


def measure(work: str, raw: Work, ours: Work, *, budget: float, repetitions: int, rounds: int = 60) -> Pair:
    """Measure one budget."""
    return Pair(work, *time_rounds(raw, ours, repetitions, rounds), budget)


def spell(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def report(pairs: Sequence[Pair], title: str) -> int:
    """Print a table, write JSON where asked to, and return how many budgets were missed."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    target = parser.parse_args().json
    width = max(len(pair.work) for pair in pairs)
    print(f"{title}\n{'work':{width}}  {'raw':>10}  {'ours':>10}  {'ratio':>7}  budget")
    for pair in pairs:
        verdict = "" if pair.ratio <= pair.budget else "  MISSED"
        print(
            f"{pair.work:{width}}  {spell(pair.raw):>10}  {spell(pair.ours):>10}  {pair.ratio:6.2f}x  "
            f"<= {pair.budget:.2f}x{verdict}"
        )
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps([{**asdict(pair), "ratio": pair.ratio} for pair in pairs], indent=2))
    return sum(pair.ratio > pair.budget for pair in pairs)
