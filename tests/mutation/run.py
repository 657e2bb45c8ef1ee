"""Mutation testing: run mutmut on a sample of the mutants of pure modules and print the share that is killed.

`[tool.mutmut]` in `pyproject.toml` names the modules and their tests. The sample is the same in each run.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SEED = 0
LEAST_SHARE = 0.85
KILLED = {"killed", "timeout"}
# mutmut generates all mutants, and notes which tests call which function, before it runs this one.
FIRST = "accelerate.base.versions.x_compare_versions__mutmut_1"


def list_mutants() -> dict[str, dict[str, str]]:
    """Return, for each module, its mutants and the status that mutmut has for each of them."""
    lines = mutmut("results", "--all", "true", quiet=True).splitlines()
    mutants: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for line in filter(None, map(str.strip, lines)):
        name, _, status = line.rpartition(": ")
        mutants[name.rpartition(".")[0]][name] = status
    return dict(sorted(mutants.items()))


def draw(mutants: dict[str, dict[str, str]], size: int) -> list[str]:
    """Draw at most `size` mutants of each module; all of them with a size of 0."""
    names: list[str] = []
    for module, of_module in mutants.items():
        count = min(size, len(of_module)) if size else len(of_module)
        names += random.Random(f"{SEED} {module}").sample(sorted(of_module), count)
    return names


def report(mutants: dict[str, dict[str, str]], sample: list[str]) -> float:
    """Print the survivors and the share of killed mutants for each module, and return the share of all."""
    statuses = {name: status for of_module in mutants.values() for name, status in of_module.items()}
    survivors = [name for name in sample if statuses[name] not in KILLED]
    print("\nSurvivors (`mutmut show NAME` prints one):", *survivors, sep="\n  ")
    print(f"\n{'module':<48} killed  sample  mutants   share")
    for module, of_module in mutants.items():
        print_share(module, [name for name in sample if name in of_module], survivors, len(of_module))
    return print_share("total", sample, survivors, len(statuses))


def print_share(title: str, sample: list[str], survivors: list[str], total: int) -> float:
    killed = len(sample) - len(set(sample) & set(survivors))
    share = killed / len(sample)
    print(f"{title:<48} {killed:6}  {len(sample):6}  {total:7}  {share:6.1%}")
    return share


def mutmut(*arguments: str, quiet: bool = False) -> str:
    command = [str(Path(sys.executable).parent / "mutmut"), *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if quiet else None).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=10, help="mutants of each module; 0 for all")
    parser.add_argument("--workers", default="2", help="processes that run mutants")
    parser.add_argument("--report-only", action="store_true", help="print the results of the last run")
    arguments = parser.parse_args()
    if not arguments.report_only:
        mutmut("run", "--max-children", arguments.workers, FIRST)
    sample = draw(list_mutants(), arguments.sample)
    if not arguments.report_only:
        mutmut("run", "--max-children", arguments.workers, *(sample if arguments.sample else ()))
    return int(report(list_mutants(), sample) < LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
