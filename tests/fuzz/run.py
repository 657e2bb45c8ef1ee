"""Run random trials of one kind, each drawn from a seed.

`python tests/fuzz/run.py --seeds 0:2000` runs the trials of seeds 0 to 1999 in processes that are forked once
for each block of trials; `--seed 7` repeats one trial. A difference is printed with its schedule. `--kind`
chooses what is compared. "resume": interrupted and resumed runs equal those without a break. "loops":
training loops on several ranks equal plain torch on one process. "axes": layouts of
models do, or are refused. "failures": launched loops whose processes are killed equal undisturbed ones.
"""

from __future__ import annotations

import argparse
import io
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import axes
import failures
import loops
import resume

sys.path.append(str(Path(__file__).parents[1]))
from distributed import conftest as ranks

BLOCK = 50  # trials whose processes are started together, unless the kind has another number
SECONDS = 8.0  # for each trial, on average, and as much again for each request
KINDS: dict[str, Any] = {"resume": resume, "loops": loops, "axes": axes, "failures": failures}
"""Modules with `describe(seed)`, which returns the schedule of a trial as text, and `run(seeds, ask)`, which
runs trials and returns the difference that each has found by its seed, or an empty string. A module may have
`outcomes`, a counter of what trials have found that is not a difference."""
Job = tuple[Any, ...]  # picklable; the seed is its first item
Ask = Callable[..., "dict[int, Any]"]
"""Calls a function with jobs and a folder on a number of ranks, where it writes the result of one job after
another to `results_RANK`. Returns for each seed the list of the results of the ranks, or what went wrong.
Within `groups`, a context manager of a list of variables, each process is a replica group."""


def asks_with(server: ranks.RankServer, root: Path) -> Ask:
    def ask(
        run_jobs: Callable[[list[Job], str], None],
        jobs: list[Job],
        world: int,
        groups: Callable[[int], AbstractContextManager[list[dict[str, str]]]] | None = None,
    ) -> dict[int, Any]:
        found: dict[int, list[Any] | str] = {}
        while jobs:
            with (
                tempfile.TemporaryDirectory(dir=root) as name,
                ranks.hold_port() as port,
                nullcontext() if groups is None else groups(world) as variables,
            ):
                folder = Path(name)
                call = ranks.describe_call(run_jobs, (jobs, str(root)))
                (folder / "call").write_bytes(pickle.dumps(call))
                request = {
                    "folder": name,
                    "environments": [
                        ranks.rank_environment(0, 1, port, variables[rank])
                        if variables
                        else ranks.rank_environment(rank, world, port, {})
                        for rank in range(world)
                    ],
                    "timeout": SECONDS * (4 + len(jobs)),
                }
                reply = server.ask(request)
                records = [read_results(folder / f"results_{rank}") for rank in range(world)]
                complaint = ranks.describe_failure(folder, "the trial", SECONDS, reply)
            done = list(zip(*records, strict=not complaint))[: len(jobs) - bool(complaint)]
            found |= {job[0]: list(results) for job, results in zip(jobs, done, strict=False)}
            if complaint:
                found[jobs[len(done)][0]] = complaint
            jobs = jobs[len(done) + bool(complaint) :]
        return found

    return ask


def read_results(path: Path) -> list[Any]:
    """The results that a rank has written, one after another."""
    results = []
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        while True:
            try:
                results.append(pickle.load(file))
            except EOFError:
                return results


def run_seeds(kind: Any, seeds: list[int], size: int, workers: int) -> Iterator[tuple[int, str]]:
    """Run trials in blocks of a size, several at a time, and yield what each has found."""
    blocks = [seeds[start : start + size] for start in range(0, len(seeds), size)]

    def run(blocks: list[list[int]]) -> Iterator[dict[int, str]]:
        server = ranks.RankServer()
        try:
            with tempfile.TemporaryDirectory() as root:
                for block in blocks:
                    yield kind.run(block, asks_with(server, Path(root)))
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
    parser.add_argument("--kind", choices=KINDS, default="resume", help="what the trials compare")
    parser.add_argument("--seeds", default="0:2000", help="first seed and end of each range: 0:9,20:30")
    parser.add_argument("--seed", type=int, help="run one trial, and print its schedule")
    parser.add_argument("--workers", type=int, default=2, help="blocks of trials that run at once")
    arguments = parser.parse_args()
    ranges = [range(*map(int, each.split(":"))) for each in arguments.seeds.split(",")]
    seeds = [seed for each in ranges for seed in each] if arguments.seed is None else [arguments.seed]
    kind = KINDS[arguments.kind]
    begin = time.monotonic()
    different = []
    size = getattr(kind, "BLOCK", BLOCK)
    for count, (seed, text) in enumerate(run_seeds(kind, seeds, size, arguments.workers), 1):
        if text or arguments.seed is not None:
            print(f"\nseed {seed}\n{kind.describe(seed)}\n{text or 'no difference'}", flush=True)
        if text:
            different.append(seed)
        if count % (2 * size) == 0:
            print(f"{count} trials, {len(different)} differ, {time.monotonic() - begin:.0f} s", flush=True)
    for outcome, number in getattr(kind, "outcomes", Counter()).most_common():
        print(f"{number} {outcome}")
    print(
        f"{len(seeds)} trials in {time.monotonic() - begin:.0f} s; "
        f"{len(different)} differ: {sorted(different)}"
    )
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
