"""`accelerate config show`: the settings a launch would start from, and where each comes from."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.settings import find_config_file, load_config_from_file, to_text

description = "Show the configuration file that the other commands read."


def show_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the subcommand.

    Args:
        parser: the subparsers of ``accelerate config``.
        parents: parsers whose options it has too.
    """
    made = parser.add_parser(
        "show",
        parents=parents,
        help=description,
        description=description,
        formatter_class=SubcommandHelpFormatter,
    )
    made.add_argument("--config_file", default=None, help="The file; default: the default one.")
    made.set_defaults(func=show_config_command)
    return made  # type: ignore[no-any-return]


def show_config_command(args: argparse.Namespace) -> None:
    """Print the file's path and its settings in today's form."""
    config = load_config_from_file(args.config_file)
    print(f"# {find_config_file(args.config_file)}")
    print(to_text(config.to_dict()), end="")
