"""What it costs to start: the command line, the imports, and a script through the launcher.

Each command runs several times in turn with the one it is compared with; processor seconds of the whole
process tree are counted, the best run of each is taken.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from pairing import Pair, report

RUNS = 9
EMPTY = [sys.executable, "-c", "pass"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def processor_seconds(command: list[str], environment: dict[str, str]) -> float:
    """Run a command to its end and return what it and its children took of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def compare(work: str, raw: list[str], ours: list[str], budget: float, *, over: bool) -> Pair:
    """Measure a command, or what it takes over another one.

    Args:
        work: What is done, for the table.
        raw: The command it is compared with.
        ours: The command.
        budget: Largest number of seconds that is accepted.
        over: Whether the budget is for what `ours` takes more than `raw`, or for all of it.
    """
    with tempfile.TemporaryDirectory() as home:  # no default configuration file
        environment = {**os.environ, "HF_HOME": home, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        processor_seconds(ours, environment)
        pairs = [
            (processor_seconds(raw, environment), processor_seconds(ours, environment)) for _ in range(RUNS)
        ]
    best_raw, best_ours = (min(column) for column in zip(*pairs, strict=True))
    return Pair(work, best_raw, best_ours, best_ours - best_raw if over else best_ours, budget, "s")


def import_over_torch() -> Pair:
    """Measure what the public class takes to import where torch is imported already."""
    code = (
        "import time; a = time.process_time(); import torch; b = time.process_time(); "
        "from accelerate import Accelerator; print(b - a, time.process_time() - b)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    runs = []
    for _ in range(RUNS):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        runs.append(tuple(map(float, done.stdout.split())))
    torch, ours = (min(column) for column in zip(*runs, strict=True))
    return Pair("from accelerate import Accelerator, after import torch", torch, ours, ours / torch, 0.12)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text("pass\n")
        ours = [sys.executable, "-c"]
        pairs = [
            compare("accelerate --help", EMPTY, [*ACCELERATE, "--help"], 0.15, over=False),
            compare("accelerate launch -h", EMPTY, [*ACCELERATE, "launch", "-h"], 0.30, over=False),
            compare(
                "accelerate launch --explain",
                EMPTY,
                [*LAUNCH, "--cpu", "--explain", str(script)],
                0.30,
                over=False,
            ),
            compare(
                "one-process launch, over plain python",
                [sys.executable, str(script)],
                [*LAUNCH, "--cpu", str(script)],
                0.20,
                over=True,
            ),
            compare(
                "import accelerate, over plain python", EMPTY, [*ours, "import accelerate"], 0.03, over=True
            ),
        ]
    return report([*pairs, import_over_torch()], "Start-up")


if __name__ == "__main__":
    sys.exit(main())
