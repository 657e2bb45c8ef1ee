"""Compare what client libraries compute on this package and on the original interface, side by side.

Give the interpreter of an environment that has the original and the same versions of the client libraries:
`python benchmarks/clients.py --original OTHER/bin/python`. Each program of `tests/clients` runs in both;
losses, evaluations, pictures and embeddings are compared number by number. `--markdown` prints a table for
the docs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "clients"))
from cases import CASES, Case, allow_training, numbers_of, run

TOLERANCE = 1e-5
APART = {"PYTHONPATH": ""}
"""Of the other environment: it must not find this package where this process does."""
LIBRARIES = ("torch", "transformers", "peft", "trl", "diffusers", "sentence-transformers", "datasets")


@dataclass(frozen=True)
class Side:
    """What one environment found: numbers, or why there are none, and the seconds it took."""

    numbers: list[float]
    failure: str
    seconds: float


def measure(python: str, case: Case, variables: dict[str, str]) -> Side:
    start, found, failure = time.perf_counter(), [], ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = numbers_of(run(python, case, Path(folder), **variables))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failure = reason_of(str(error))
    return Side(found, failure, time.perf_counter() - start)


def reason_of(output: str) -> str:
    """The lines that name errors, without the code around them."""
    named = [line for line in output.splitlines() if re.search(r"(Error|Exception)(: |$)", line)]
    return "\n".join(dict.fromkeys(named[:6])) or output[-300:]


def difference(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference; infinite where one has other numbers, or none."""
    if len(ours) != len(theirs) or not ours:
        return float("inf")
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    found = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]
    return max((each if each == each else float("inf") for each in found), default=0.0)


def described(python: str, variables: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Where an environment has the package, and its versions."""
    program = (
        "import importlib.util as u, importlib.metadata as m; print(u.find_spec('accelerate').origin)\n"
        f"for name in ('accelerate', *{LIBRARIES}): print(name, m.version(name))"
    )
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [python, "-c", program], env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    place, *lines = done.stdout.splitlines()
    return place, dict(line.split(" ", 1) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", required=True, help="interpreter of the other environment")
    parser.add_argument("--only", default="", help="only cases with this in their names")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    arguments = parser.parse_args()
    copied = tempfile.TemporaryDirectory()
    sides = [(sys.executable, allow_training(Path(copied.name))), (arguments.original, APART)]
    (own, versions), (other, others) = (described(*side) for side in sides)
    if own == other:
        parser.error(f"both environments have the package at {own}: nothing would be compared")
    unlike = [name for name in LIBRARIES if versions[name] != others[name]]
    if unlike:
        parser.error(f"other versions of {', '.join(unlike)} in {arguments.original}")
    print(f"accelerate {versions.pop('accelerate')} beside {others.pop('accelerate')}, with ", end="")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    row = "| {} | {} | {} | {} | {} |" if arguments.markdown else "{:46} {:>8} {:>11} {:>8} {:>8}"
    print(row.format("case", "numbers", "difference", "ours", "other"))
    if arguments.markdown:
        print("|---|---:|---:|---:|---:|")
    missed = 0
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        ours, theirs = (measure(python, case, variables) for python, variables in sides)
        apart = difference(ours.numbers, theirs.numbers)
        missed += apart > TOLERANCE
        times = (f"{side.seconds:.1f} s" for side in (ours, theirs))
        print(row.format(name, len(ours.numbers), f"{apart:.1e}", *times), flush=True)
        for which, side in (("ours", ours), ("other", theirs)):
            if side.failure:
                print(f"{which} FAILED: {side.failure}", file=sys.stderr, flush=True)
    copied.cleanup()
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
