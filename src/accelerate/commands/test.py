"""`accelerate test`: launch the self-check the way a script would be launched."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.commands.running import (
    execute_subprocess_async as execute_subprocess_async,
    path_in_accelerate_package as path_in_accelerate_package,
)
from accelerate.commands.same_run import check_resume
from accelerate.commands.utils import entry_point, make_parser

DESCRIPTION = "Check that state, random numbers, data loading, training and gathering work on this machine."
SCRIPT = "accelerate.test_utils.scripts.test_script"


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028
    """The parser of ``accelerate test``.

    Args:
        subparsers: of `accelerate`; ``None`` for a parser of its own.
    """
    parser = make_parser("test", DESCRIPTION, subparsers, test_command)
    parser.add_argument("--config_file", default=None, help="Configuration file to launch with.")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="Check instead that an interrupted and resumed run is the same run: samples and weights.",
    )
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Launch the self-check; each check prints a line, and with ``resume`` a row of a table.

    Args:
        args: ``config_file`` and ``resume``.

    Raises:
        ConfigurationError: the configuration cannot work.
        CheckpointError: a resumed run is another run.
        SystemExit: a check failed.
    """
    words = ["--config_file", args.config_file] if args.config_file else []
    if getattr(args, "resume", False):
        check_resume(words)
        return
    launch_command(launch_command_parser().parse_args([*words, "--module", SCRIPT]))


main = entry_point(test_command_parser)


if __name__ == "__main__":
    main()
