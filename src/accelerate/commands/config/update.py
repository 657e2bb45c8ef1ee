"""The command `accelerate config update`, which rewrites a file of any version in the current format."""

from __future__ import annotations

import argparse

from accelerate.base import expanded
from accelerate.commands.config.config_utils import (
    SubcommandHelpFormatter as SubcommandHelpFormatter,
    add_config_file,
    add_subcommand,
)
from accelerate.commands.utils import Subparsers
from accelerate.settings import (
    default_config_file as default_config_file,
    default_config_path,
    load_config_from_file as load_config_from_file,
    write_mapping,
)

description = (
    "Update an existing config file with the latest defaults while maintaining the old configuration."
)


def update_config(args: argparse.Namespace) -> str:
    """Loads a configuration file and writes it in the current format.

    Args:
        args: Arguments with ``config_file``, its path. ``None`` for the default file.

    Returns:
        The path.

    Raises:
        ConfigurationError: The file does not exist, or its content is wrong.
    """
    path = expanded(args.config_file or default_config_path())
    write_mapping(path, load_config_from_file(str(path)).to_dict())
    return str(path)


def update_command_parser(
    parser: Subparsers, parents: list[argparse.ArgumentParser]
) -> argparse.ArgumentParser:
    """Adds the subcommand, which has the options of `parents`, too."""
    child = add_subcommand(parser, parents, "update", description, update_config_command)
    add_config_file(child)
    return child


def update_config_command(args: argparse.Namespace) -> None:
    """Updates the file and prints its path."""
    print(f"The configuration in {update_config(args)} is up to date.")
