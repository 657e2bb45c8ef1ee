"""Measure `accelerate report` for a run of 10^6 steps: time, memory, and the size of the page.

python benchmarks/report.py [--json FILE]
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from accelerate.monitoring import PHASES, RecordWriter, Start, Values, Window
from pairing import Pair, report

STEPS = 1_000_000
STEPS_OF_A_WINDOW = 100
RESTARTS = 20
COMMAND = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "report"]


def write_run(folder: Path) -> int:
    """Write the records of one rank that logged three values per step; return how many bytes they have."""
    writer = RecordWriter(folder / "run_records", 0)
    for start in range(RESTARTS):
        writer.write(Start(time=time.time(), rank=0, world_size=1, pid=1, attempt=start))
        first = start * STEPS // RESTARTS
        for begin in range(first, first + STEPS // RESTARTS, STEPS_OF_A_WINDOW):
            writer.write(*(values(step) for step in range(begin, begin + STEPS_OF_A_WINDOW)), window(begin))
    writer.close()
    return writer.path.stat().st_size


def values(step: int) -> Values:
    """Return what is logged at a step."""
    loss = math.nan if step % 100_003 == 0 else 1.0 + math.sin(step / 1000)
    return Values(time=time.time(), step=step, values={"loss": loss, "lr": 1 / (step + 1), "norm": step % 97})


def window(step: int) -> Window:
    seconds_by = {name: 0.001 * (index + step % 5) for index, name in enumerate(PHASES)}
    return Window(
        time=time.time(),
        first=step,
        last=step + STEPS_OF_A_WINDOW - 1,
        seconds=sum(seconds_by.values()),
        seconds_by=seconds_by,
        memory=2**30 + step,
        samples=800,
        values={"learning_rate": 0.1},
    )


def read_raw(path: Path) -> float:
    """Return the processor seconds that reading the lines as JSON takes alone."""
    start = time.process_time()
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)
    return time.process_time() - start


def main() -> int:
    """Measure, print a table, and return how many budgets were missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_run(folder)
        raw = read_raw(folder / "run_records" / "rank-00000.jsonl")
        subprocess.run([*COMMAND, str(folder)], check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds, memory = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
        page = (folder / "report.html").stat().st_size
    pairs = [
        Pair(f"read {STEPS:,} steps and write the page, over json.loads", raw, seconds, seconds / raw, 5.0),
        Pair(f"page of {size / 1e6:.0f} MB of records", size, page, page / 1e6, 3.0, "MB", "B"),
        Pair("memory of the command", size, memory, memory / 1e6, 100.0, "MB", "B"),
    ]
    return report(pairs, "Report")


if __name__ == "__main__":
    sys.exit(main())
