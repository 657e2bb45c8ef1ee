"""`accelerate report`: one page about a run, or about several side by side, from what its ranks recorded."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.base import ConfigurationError, convert_bytes, replace_files, wrong_value
from accelerate.commands.checkpoint import find_rows, minute_of
from accelerate.commands.utils import CustomArgumentParser, entry_point, parser_of

if TYPE_CHECKING:
    from accelerate.report import Run

DESCRIPTION = (
    "Write one page of HTML about a run from the records in its project folder: how it ended, values, time, "
    "memory, ranks, checkpoints, events and configuration. Several folders are shown side by side."
)
FILE = "report.html"
MOST_RUNS = 8


def report_command(args: argparse.Namespace) -> None:
    """Write the page, or print the summary.

    Args:
        args: ``folders``, ``output`` and ``json``.

    Raises:
        ConfigurationError: A folder has no records, or the page cannot be written.
    """
    from accelerate.report import clean, finding, summarize, write_page

    runs = _read_runs(args.folders)
    if args.json:
        print(json.dumps([summarize(run) for run in runs], indent=1, default=str))
        return
    for run in runs:
        run.stored = _stored(run)
    folder = args.folders[0] if len(runs) == 1 else Path()
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
        print(clean(f"{run.name}: {run.outcome()[1]}"))
        for entry in run.conclusions.in_order():
            print(clean(f"  {entry.record.name} (step {entry.last_step}): {finding(entry.record)}"))
    print(f"Written to {target} ({convert_bytes(len(page))}).")


def _read_runs(folders: list[Path]) -> list[Run]:
    """Read the runs; those in folders of one name are named by their paths."""
    from accelerate.report import read_run

    if len(folders) > MOST_RUNS:
        reason = f"at most {MOST_RUNS} runs are compared, each with a color of its own"
        raise wrong_value("DIR", [str(folder) for folder in folders], reason, "name fewer folders")
    names = Counter(folder.absolute().name for folder in folders)
    return [read_run(folder, "" if names[folder.absolute().name] == 1 else str(folder)) for folder in folders]


def _stored(run: Run) -> list[tuple[str, ...]]:
    """Describe the checkpoints that are in the folder of a run now."""
    return [
        (
            str(Path(row.path).relative_to(run.folder.absolute())),
            "" if row.step is None else str(row.step),
            minute_of(row.created),
            "" if row.bytes is None else convert_bytes(row.bytes),
            "complete" if row.complete else row.fault,
        )
        for row in find_rows(run.folder, deep=False)
    ]


@parser_of("report", DESCRIPTION, report_command)
def report_command_parser(parser: CustomArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="The project_dir of a run; several are compared."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="Where to write the page; by default report.html in DIR, with several runs in this folder.",
    )
    parser.add_argument("--json", action="store_true", help="Print a summary as JSON, and write no page.")


main = entry_point(report_command_parser, __name__)
