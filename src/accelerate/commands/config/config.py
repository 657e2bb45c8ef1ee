"""`accelerate config`: its parser and its subcommands."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.base.enums import ComputeEnvironment as ComputeEnvironment
from accelerate.base.errors import ConfigurationError
from accelerate.commands.config.default import default_command_parser
from accelerate.commands.config.show import show_command_parser
from accelerate.commands.config.update import update_command_parser
from accelerate.commands.utils import make_parser, run_command
from accelerate.settings.config_file import cache_dir as cache_dir
from accelerate.settings.config_file import default_config_file as default_config_file
from accelerate.settings.config_file import default_yaml_config_file as default_yaml_config_file
from accelerate.settings.config_file import load_config_from_file as load_config_from_file

description = "Create, update or show the configuration file that every command reads."


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of ``accelerate config`` without its subcommands.

    Args:
        subparsers: of `accelerate`; ``None`` for a parser of its own.
    """
    parser = make_parser("config", description, subparsers)
    parser.add_argument("--config_file", default=None, help="The file; default: the default one.")
    parser.set_defaults(func=config_command)
    return parser  # type: ignore[no-any-return]


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of ``accelerate config`` with its subcommands.

    Args:
        subparsers: of `accelerate`; ``None`` for a parser of its own.
    """
    parser = config_command_parser(subparsers)
    parent = argparse.ArgumentParser(add_help=False)
    children = parser.add_subparsers(title="subcommands", dest="subcommand")
    for add in (default_command_parser, update_command_parser, show_command_parser):
        add(children, [parent])
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask for a subcommand.

    Raises:
        ConfigurationError: always; each subcommand has a function of its own.
    """
    raise ConfigurationError("accelerate config needs a subcommand: default, update or show.")


def main() -> None:
    """Run as ``accelerate-config`` or ``python -m accelerate.commands.config``."""
    args = get_config_parser().parse_args()
    run_command(args.func, args)


if __name__ == "__main__":
    main()
