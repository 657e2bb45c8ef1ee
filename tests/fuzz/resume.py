"""Trials of resumes: interrupted and resumed runs of random schedules equal those without a break."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import trial
from trial import Event, Result, describe as describe, draw as draw

Job = tuple[int, str, Event | None]


def run(seeds: list[int], ask: Any) -> dict[int, str]:
    """Run trials, and return what each of them has found; empty text where nothing differs."""
    groups: defaultdict[tuple[int, str], list[Job]] = defaultdict(list)
    for seed in seeds:
        schedule = trial.draw(seed)
        phase = "before" if schedule.way in ("process", "resize") else "both"
        groups[schedule.world, phase].append((seed, phase, None))
    found: dict[int, str] = {}
    before: dict[int, list[Result]] = {}
    for (world, phase), jobs in groups.items():
        for seed, results in ask(trial.run_jobs, jobs, world).items():
            if isinstance(results, str):
                found[seed] = results
            elif phase == "before":
                before[seed] = results
            else:
                found[seed] = describe_ranks([result.difference for result in results])
    later: defaultdict[int, list[Job]] = defaultdict(list)
    for seed, results in before.items():
        if results[0].difference:
            found[seed] = results[0].difference
            continue
        stop = trial.find_stop(trial.draw(seed), results[0].whole)
        later[trial.draw(seed).resumed_world].append((seed, "after", stop))
    for world, jobs in later.items():
        for seed, outcome in ask(trial.run_jobs, jobs, world).items():
            stop = next(stop for number, _, stop in jobs if number == seed)
            assert stop is not None
            found[seed] = outcome if isinstance(outcome, str) else compare(seed, before[seed], outcome, stop)
    return found


def compare(seed: int, before: list[Result], after: list[Result], stop: Event) -> str:
    schedule = trial.draw(seed)
    if after[0].refused or after[0].difference:
        return after[0].difference
    if schedule.resized:  # each rank has the samples of all
        return describe_ranks([trial.compare(before[0], result, schedule, stop) for result in after])
    pairs = zip(before, after, strict=True)
    return describe_ranks([trial.compare(one, other, schedule, stop) for one, other in pairs])


def describe_ranks(differences: list[str]) -> str:
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(differences) if text)
