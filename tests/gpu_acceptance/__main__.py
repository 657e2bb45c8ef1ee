"""`python -m tests.gpu_acceptance`: run all parts, write `results.json` and print a table."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from .runner import ROOT, Run, run

LIMIT, TINY_LIMIT = 480, 1800


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_acceptance", description=__doc__)
    parser.add_argument("--device", help="type of the device, as torch names it; default: the accelerator")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes at which figures mean nothing: seconds on a CPU"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these parts only")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "acceptance", metavar="DIR"
    )
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    parser.add_argument(
        "--limit", type=float, help=f"seconds for all parts: {LIMIT}, or {TINY_LIMIT} with --tiny"
    )
    parser.add_argument("--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), metavar="N")
    parser.add_argument("--table", default=".table", metavar="MODULE", help="module with the parts")
    return parser.parse_args()


def main() -> int:
    given = read_arguments()
    table = import_module(given.table, __package__)
    parts = tuple(part for part in table.PARTS if not given.only or part.name in given.only)
    if unknown := set(given.only) - {part.name for part in parts}:
        names = ", ".join(part.name for part in table.PARTS)
        print(f"There is no part {', '.join(sorted(unknown))}. Parts: {names}.", file=sys.stderr)
        return 2
    limit = given.limit or (TINY_LIMIT if given.tiny else LIMIT)
    return run(
        Run(
            device=given.device,
            tiny=given.tiny,
            out=given.out.resolve(),
            imports=tuple(given.imports),
            limit=limit,
            jobs=given.jobs,
            table=table.__name__,
        ),
        parts,
        first=table.FACTS,
        last=table.LEFT,
    )


if __name__ == "__main__":
    sys.exit(main())
