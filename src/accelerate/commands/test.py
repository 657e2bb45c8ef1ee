"""The command `accelerate test`, which launches a self-check on this machine.

With --resume it compares a run that is interrupted and resumed with an uninterrupted run, and with --failures
a run whose processes are killed with an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.base import CheckpointError, LaunchError
from accelerate.commands.failure_check import check_failures
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.commands.running import (
    execute_subprocess_async as execute_subprocess_async,
    path_in_accelerate_package as path_in_accelerate_package,
)
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser
from accelerate.launch import LAUNCH_COMMAND, run_child

DESCRIPTION = "Check that state, random numbers, data loading, training and gathering work on this machine."
SCRIPT = "accelerate.test_utils.scripts.test_script"
RESUME_SCRIPT = "accelerate.test_utils.scripts.test_resume"
RUNS = ("whole", "interrupted", "resumed")
SAME = "same"
FILE_WIDTH = 140  # columns of a table that is not printed to a terminal
Record = dict[str, Any]  # record of one rank in one run


def test_command(args: argparse.Namespace) -> None:
    """Launches the self-check, in which each check prints a line, or the check of resumed or failing runs.

    Args:
        args: Arguments with ``config_file``, ``num_processes``, ``resume`` and ``failures``.

    Raises:
        ConfigurationError: The configuration is not valid.
        CheckpointError: A resumed run or one that restarts differs from the uninterrupted run.
        RecoveryError: A run whose replica groups fail differs from the undisturbed run.
        SystemExit: A check failed.
    """
    words = ["--config_file", args.config_file] if args.config_file else []
    if getattr(args, "num_processes", None) is not None:
        words += ["--num_processes", str(args.num_processes)]
    if getattr(args, "resume", False):
        check_resume(words)
        return
    if getattr(args, "failures", False):
        check_failures(words)
        return
    launch_command(launch_command_parser().parse_args([*words, "--module", SCRIPT]))


@dataclass(frozen=True)
class ResumeResult:
    """Result of the comparison for one kind of loader."""

    name: str
    workers: int
    batches: int  # number of compared batches, over all ranks
    samples: str  # "same", or the first batch that differs
    weights: str  # "same", or the largest difference

    @property
    def is_same(self) -> bool:
        return self.samples == self.weights == SAME


def check_resume(words: Sequence[str]) -> None:
    """Launches the three runs, compares them, and prints a table.

    Raises a `CheckpointError` if they differ.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate-resume-") as folder:
        for run in RUNS:
            print(f"{run} run ...", flush=True)
            if code := run_child([*LAUNCH_COMMAND, *words, "--module", RESUME_SCRIPT, run, folder], {}).code:
                raise LaunchError(f"The {run} run ended with exit code {code}: its output is above.")
        whole, interrupted, resumed = (read_records(Path(folder), run) for run in RUNS)
    results = compare(whole, interrupted, resumed)
    _print_table(whole[0], results)
    if different := [f"{case.name} ({case.workers} workers)" for case in results if not case.is_same]:
        raise CheckpointError(
            "A run that is interrupted and resumed is not the same run on this machine. These loaders give "
            f"other samples or weights: {', '.join(different)}."
        )
    print("A run that is interrupted and resumed is the same run on this machine.")


def read_records(folder: Path, run: str) -> list[Record]:
    """Returns the records of the ranks of this node in a run, in the order of ranks."""
    paths = sorted(folder.glob(f"{run}_*.json"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if not paths:
        raise LaunchError(
            f"The {run} run left no record on this machine. The check needs a configuration that runs the "
            "processes here and waits for them, not one that submits a job."
        )
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def compare(whole: list[Record], interrupted: list[Record], resumed: list[Record]) -> list[ResumeResult]:
    """Compares the interrupted run and the resumed one with the uninterrupted one, bit for bit."""
    results = []
    for key, case in whole[0]["cases"].items():
        runs = zip(whole, interrupted, resumed, strict=True)
        ranks = [tuple(record["cases"][key] for record in records) for records in runs]
        samples = [_compare_steps(first["steps"], a["steps"] + b["steps"]) for first, a, b in ranks]
        weights = [_compare_weights(first["weights"], b["weights"]) for first, _, b in ranks]
        batches = sum(len(first["steps"]) for first, _, _ in ranks)
        results.append(ResumeResult(case["name"], case["workers"], batches, _join(samples), _join(weights)))
    return results


def _compare_steps(expected: list[Any], actual: list[Any]) -> str:
    for (epoch, batch, samples), step in zip(expected, actual, strict=False):
        if step != [epoch, batch, samples]:
            return f"differ from epoch {epoch}, batch {batch} on"
    if len(expected) != len(actual):
        return f"{len(actual)} batches instead of {len(expected)}"
    return SAME


def _compare_weights(expected: dict[str, list[float]], actual: dict[str, list[float]]) -> str:
    sizes, actual_sizes = ({name: len(values) for name, values in w.items()} for w in (expected, actual))
    if sizes != actual_sizes:
        return "have other names or sizes"
    differences = {
        name: max((abs(a - b) for a, b in zip(values, actual[name], strict=True)), default=0.0)
        for name, values in expected.items()
        if values != actual[name]
    }
    if not differences:
        return SAME
    worst = max(differences, key=lambda name: differences[name])
    return f"differ by up to {differences[worst]:.1e} ({worst})"


def _join(results: list[str]) -> str:
    """Returns the first difference with its rank, or "same"."""
    return next((f"rank {rank}: {result}" for rank, result in enumerate(results) if result != SAME), SAME)


def _print_table(record: Record, results: list[ResumeResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{record['processes']} process(es) on {record['device']}, {record['kind']}"
    table = Table(title=f"{title}, mixed_precision={record['mixed_precision']}")
    for heading in ("loader", "workers", "batches", "samples", "weights"):
        table.add_column(heading, justify="right" if heading in ("workers", "batches") else "left")
    for case in results:
        table.add_row(case.name, str(case.workers), str(case.batches), case.samples, case.weights)
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def test_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:  # noqa: PT028
    """Returns the parser of ``accelerate test``, added to `subparsers` if given."""
    parser = make_parser("test", DESCRIPTION, test_command, subparsers)
    parser.add_argument("--config_file", help="Configuration file to launch with.")
    parser.add_argument("--num_processes", type=int, metavar="N", help="Number of processes to launch.")
    check = parser.add_mutually_exclusive_group()
    check.add_argument(
        "--resume",
        action="store_true",
        help="Check instead that an interrupted and resumed run is the same run: samples and weights.",
    )
    check.add_argument(
        "--failures",
        action="store_true",
        help="Check instead that a run whose processes are killed has the result of an undisturbed run, and "
        "measure how long it takes to continue.",
    )
    return parser


main = entry_point(test_command_parser, __name__)
