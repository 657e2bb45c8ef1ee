"""The command `accelerate completion`, which prints a completion script for bash, zsh or fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from accelerate.base import require
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser
from accelerate.settings import subcommands

SHELLS = {
    "bash": 'eval "$(accelerate completion bash)"     # in ~/.bashrc',
    "zsh": 'eval "$(accelerate completion zsh)"      # in ~/.zshrc, after compinit',
    "fish": "accelerate completion fish | source      # in ~/.config/fish/config.fish",
}
"""Shell -> the line that enables completion."""

DESCRIPTION = (
    "Print a script that completes commands, flags, their values and files. To switch it on: "
    + "; ".join(line.split("  ")[0] for line in SHELLS.values())
    + "."
)
FILE_MARKS = ("_file", "_path", "hostfile", "script", "checkpoint_directory", "model_name")
FOLDER_MARKS = ("_dir",)


def completion_command(args: argparse.Namespace) -> None:
    print(make_script(args.shell))


def make_script(shell: str) -> str:
    """Returns the script that completes `accelerate` in a shell.

    Requires the package shtab.
    """
    require("shtab", "Completion in the shell")
    import shtab

    from accelerate.commands.accelerate_cli import COMMANDS, make_cli_parser

    parser = make_cli_parser([])
    for name, child in subcommands(parser).items():
        child.description = COMMANDS[name][1]
    for action in _actions(parser):
        if action.nargs == 0 or action.choices:
            continue
        if action.dest.endswith(FILE_MARKS) or action.dest == "training_script_args":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest.endswith(FOLDER_MARKS):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell, root_prefix="accelerate")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from parser._actions
    for child in subcommands(parser).values():
        yield from _actions(child)


def completion_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate completion``, added to `subparsers` if given."""
    parser = make_parser("completion", DESCRIPTION, completion_command, subparsers)
    parser.add_argument("shell", choices=tuple(SHELLS), help="Your shell.")
    return parser


main = entry_point(completion_command_parser, __name__)
