"""`accelerate config schema`: where the JSON Schema of the configuration file is."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.settings import SCHEMA_FILE

description = (
    "Print the path of the JSON Schema of the configuration file, with which editors complete and check it. "
    "In VS Code and others with a YAML language server, make this the first line of the file: "
    "# yaml-language-server: $schema=PATH"
)


def schema_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the subcommand.

    Args:
        parser: the subparsers of ``accelerate config``.
        parents: parsers whose options it has too.
    """
    made = parser.add_parser(
        "schema",
        parents=parents,
        help="Print the path of the JSON Schema of the configuration file.",
        description=description,
        formatter_class=SubcommandHelpFormatter,
    )
    made.set_defaults(func=schema_command)
    return made  # type: ignore[no-any-return]


def schema_command(args: argparse.Namespace) -> None:
    """Print the path.

    Args:
        args: nothing of it is read.
    """
    print(SCHEMA_FILE)
