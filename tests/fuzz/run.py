"""Fuzz resumes: interrupted and resumed runs of random schedules equal those without a break.

`python tests/fuzz/run.py --seeds 0:2000` runs the trials of seeds 0 to 1999 in processes that are forked once
for each block of trials; `--seed 7` repeats one trial. A difference is printed with its schedule.
"""

from __future__ import annotations

import argparse
import io
import pickle
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import trial
from trial import Event, Result

sys.path.append(str(Path(__file__).parents[1]))
from distributed import conftest as ranks

BLOCK = 50  # trials whose processes are started together
SECONDS = 8.0  # for each trial, on average, and as much again for each request
Job = tuple[int, str, Event | None]
Ask = Callable[[list[Job], int], "dict[int, list[Result] | str]"]
"""Runs jobs on a number of ranks; returns the results of the ranks, or what went wrong."""


def asks_with(server: ranks.RankServer, root: Path) -> Ask:
    def ask(jobs: list[Job], world: int) -> dict[int, list[Result] | str]:
        found: dict[int, list[Result] | str] = {}
        while jobs:
            with tempfile.TemporaryDirectory(dir=root) as name, ranks.hold_port() as port:
                folder = Path(name)
                call = ranks.describe_call(trial.run_jobs, (jobs, str(root)))
                (folder / "call").write_bytes(pickle.dumps(call))
                request = {
                    "folder": name,
                    "environments": [ranks.rank_environment(rank, world, port, {}) for rank in range(world)],
                    "timeout": SECONDS * (4 + len(jobs)),
                }
                reply = server.ask(request)
                records = [read_results(folder / trial.results_file(rank)) for rank in range(world)]
                complaint = ranks.describe_failure(folder, "the trial", SECONDS, reply)
            done = list(zip(*records, strict=not complaint))[: len(jobs) - bool(complaint)]
            found |= {job[0]: list(results) for job, results in zip(jobs, done, strict=False)}
            if complaint:
                found[jobs[len(done)][0]] = complaint
            jobs = jobs[len(done) + 1 :]
        return found

    return ask


def read_results(path: Path) -> list[Result]:
    """The results that a rank has written, one after another."""
    results = []
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        while True:
            try:
                results.append(pickle.load(file))
            except EOFError:
                return results


def run_block(seeds: list[int], ask: Ask) -> dict[int, str]:
    """Run trials, and return what each of them has found; empty text where nothing differs."""
    groups: defaultdict[tuple[int, str], list[Job]] = defaultdict(list)
    for seed in seeds:
        schedule = trial.draw(seed)
        phase = "before" if schedule.way in ("process", "resize") else "both"
        groups[schedule.world, phase].append((seed, phase, None))
    found: dict[int, str] = {}
    before: dict[int, list[Result]] = {}
    for (world, phase), jobs in groups.items():
        for seed, results in ask(jobs, world).items():
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
        for seed, outcome in ask(jobs, world).items():
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


def run_seeds(seeds: list[int], workers: int) -> Iterator[tuple[int, str]]:
    """Run trials in blocks, several at a time, and yield what each has found."""
    blocks = [seeds[start : start + BLOCK] for start in range(0, len(seeds), BLOCK)]

    def run(blocks: list[list[int]]) -> Iterator[dict[int, str]]:
        server = ranks.RankServer()
        try:
            with tempfile.TemporaryDirectory() as root:
                for block in blocks:
                    yield run_block(block, asks_with(server, Path(root)))
        finally:
            server.close()

    with ThreadPoolExecutor(workers) as pool:
        parts: list[Any] = [run(blocks[index::workers]) for index in range(workers)]
        pending = {pool.submit(next, part, None): part for part in parts}
        while pending:
            for future in [future for future in pending if future.done()] or [next(iter(pending))]:
                part = pending.pop(future)
                if (found := future.result()) is None:
                    continue
                yield from found.items()
                pending[pool.submit(next, part, None)] = part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="first seed and end of the range")
    parser.add_argument("--seed", type=int, help="run one trial, and print its schedule")
    parser.add_argument("--workers", type=int, default=2, help="blocks of trials that run at once")
    arguments = parser.parse_args()
    seeds = (
        [arguments.seed] if arguments.seed is not None else list(range(*map(int, arguments.seeds.split(":"))))
    )
    begin = time.monotonic()
    different = []
    for count, (seed, text) in enumerate(run_seeds(seeds, arguments.workers), 1):
        if text or arguments.seed is not None:
            print(f"\nseed {seed}\n{trial.describe(seed)}\n{text or 'no difference'}", flush=True)
        if text:
            different.append(seed)
        if count % 100 == 0:
            print(f"{count} trials, {len(different)} differ, {time.monotonic() - begin:.0f} s", flush=True)
    print(
        f"{len(seeds)} trials in {time.monotonic() - begin:.0f} s; "
        f"{len(different)} differ: {sorted(different)}"
    )
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
