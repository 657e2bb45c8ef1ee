"""The command `accelerate report`, which writes an HTML page about one or more runs from their records."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.base import ConfigurationError, convert_bytes, replace_files, wrong_value
from accelerate.commands.checkpoint import format_time, summarize_checkpoints
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser

if TYPE_CHECKING:
    from accelerate.report import Run

DESCRIPTION = (
    "Write one page of HTML about a run from its records: how it ended, values, time, memory, ranks, "
    "checkpoints, events and configuration. Several runs are shown side by side."
)
FILE = "report.html"
MAX_RUNS = 8


def report_command(args: argparse.Namespace) -> None:
    """Writes the page, or prints a summary as JSON.

    Args:
        args: Arguments with ``folders``, ``output`` and ``json``.

    Raises:
        ConfigurationError: There are no records, or the page cannot be written.
    """
    from accelerate.report import conclusion_text, mesh_lines, sanitize, summarize, write_page

    runs = _read_runs(args.folders) if args.folders else [_read_newest()]
    if args.json:
        print(json.dumps([summarize(run) for run in runs], indent=1, default=str))
        return
    for run in runs:
        run.stored = _checkpoint_rows(run)
    folder = args.folders[0] if len(args.folders) == 1 and args.folders[0].is_dir() else Path()
    target = args.output or folder / FILE
    page = write_page(runs).encode("utf-8", "replace")
    try:
        with replace_files([target]) as (temporary,):
            temporary.write_bytes(page)
    except OSError as error:
        raise ConfigurationError(
            f"{target} cannot be written: {error.strerror}. Name a file in another folder with --output."
        ) from error
    for run in runs:
        print(sanitize(f"{run.name}: {run.outcome()[1]}"))
        for line in mesh_lines(run):
            print(sanitize(f"  {line}"))
        goodput = run.goodput()
        for line in goodput.lines() if goodput is not None and goodput.wall else ():
            print(sanitize(f"  {line}"))
        for entry in run.conclusions.in_order():
            print(
                sanitize(f"  {entry.record.name} (step {entry.last_step}): {conclusion_text(entry.record)}")
            )
    print(f"Written to {target} ({convert_bytes(len(page))}).")


def _read_runs(folders: list[Path]) -> list[Run]:
    """Returns the runs, which have their paths as names if several folders have the same name."""
    from accelerate.monitoring import name_of_run
    from accelerate.report import read_run

    if len(folders) > MAX_RUNS:
        reason = f"at most {MAX_RUNS} runs are compared, each with its own color"
        raise wrong_value("DIR", [str(folder) for folder in folders], reason, "name fewer folders")
    names = Counter(name_of_run(folder) for folder in folders)
    return [read_run(folder, "" if names[name_of_run(folder)] == 1 else str(folder)) for folder in folders]


def _read_newest() -> Run:
    """Returns the newest run of the user, which has the name of its script."""
    from accelerate.monitoring import newest_run
    from accelerate.report import read_run

    run = read_run(newest_run())
    if run.starts and run.starts[-1].script:
        run.name = f"{run.starts[-1].script} ({run.name})"
    return run


def _checkpoint_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns a row of texts for each checkpoint that is in the folder of a run now."""
    return [
        (
            os.path.relpath(row.path, run.folder),
            "" if row.step is None else str(row.step),
            format_time(row.created),
            "" if row.bytes is None else convert_bytes(row.bytes),
            "complete" if row.complete else row.fault,
        )
        for row in summarize_checkpoints(run.folder, deep=False)
    ]


def report_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate report``, added to `subparsers` if given."""
    parser = make_parser("report", DESCRIPTION, report_command, subparsers)
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="The project_dir of a run on this machine, or the folder of its records; several are compared. "
        "By default the newest run.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="Where to write the page; by default report.html in DIR, or in this folder without one DIR.",
    )
    parser.add_argument("--json", action="store_true", help="Print a summary as JSON, and write no page.")
    return parser


main = entry_point(report_command_parser, __name__)
