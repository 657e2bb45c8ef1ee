"""The command `accelerate monitor`, which shows a run in a terminal from its records.

It works in any terminal that can read the folder, also for a run of another node on a shared disk, and for a
run that has ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from accelerate.base import require
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser

DESCRIPTION = (
    "Show a run from its records: throughput, the time of steps by phase, memory, the slowest rank and "
    "conclusions. The view is updated until the run has ended, and printed once where "
    "there is no terminal."
)
INTERVAL = 1.0
"""Seconds between two updates."""


def monitor_command(args: argparse.Namespace) -> None:
    """Shows a run until it has ended.

    Args:
        args: Arguments with ``folder``.

    Raises:
        ConfigurationError: There are no records, and no terminal or no folder to wait for them.
        MissingPackageError: rich is not installed.
    """
    from accelerate.monitoring import RunReader, find_records, name_of_run, newest_run, no_records, render

    require("rich", "accelerate monitor")
    from rich.console import Console
    from rich.live import Live

    folder: Path = newest_run() if args.folder is None else args.folder
    title = name_of_run(folder)
    reader = RunReader(title, lambda: [(records.rank, records.path) for records in find_records(folder)])
    view = reader.read()
    console = Console(markup=False, highlight=False)
    if not sys.stdout.isatty():
        if not view.ranks:
            raise no_records(folder)
        console.print(render(view))
        return
    with Live(render(view), console=console, auto_refresh=False) as live:
        while not view.has_ended:
            live.refresh()
            time.sleep(INTERVAL)
            view = reader.read()
            live.update(render(view))
        live.refresh()


def monitor_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate monitor``, added to `subparsers` if given."""
    parser = make_parser("monitor", DESCRIPTION, monitor_command, subparsers)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="The project_dir of a run on this machine, or the folder of its records. By default the newest "
        "run.",
    )
    return parser


main = entry_point(monitor_command_parser, __name__)
