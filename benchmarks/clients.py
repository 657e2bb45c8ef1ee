"""Compare what client libraries compute on this package and on the original interface, side by side.

Give the interpreter of an environment that has the original and the same versions of the client libraries:
`python benchmarks/clients.py --original OTHER/bin/python`. Each program of `tests/clients` runs in both;
losses, evaluations, pictures and embeddings are compared number by number.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "clients"))
from cases import CASES, numbers_of, run

TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", required=True, help="interpreter of the other environment")
    parser.add_argument("--only", default="", help="only cases with this in their names")
    arguments = parser.parse_args()
    print(f"{'case':46} {'numbers':>8} {'difference':>11} {'ours':>7} {'other':>7}")
    missed = 0
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        found, seconds = [], []
        for python in (sys.executable, arguments.original):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                found.append(numbers_of(run(python, case, Path(folder))))
                seconds.append(time.perf_counter() - start)
        ours, theirs = found
        difference = max(
            (abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True)), default=0.0
        )
        missed += difference > TOLERANCE
        verdict = "  DIFFERENT" if difference > TOLERANCE else ""
        print(
            f"{name:46} {len(ours):8} {difference:11.1e} {seconds[0]:6.1f}s {seconds[1]:6.1f}s{verdict}",
            flush=True,
        )
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
