"""`accelerate completion`: what makes TAB work in bash, zsh and fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from accelerate.base import require
from accelerate.commands.utils import CustomArgumentParser, entry_point, parser_of
from accelerate.settings import subcommands

SHELLS = {
    "bash": 'eval "$(accelerate completion bash)"     # in ~/.bashrc',
    "zsh": 'eval "$(accelerate completion zsh)"      # in ~/.zshrc, after compinit',
    "fish": "accelerate completion fish | source      # in ~/.config/fish/config.fish",
}
"""Shell -> the line that switches completion on."""

DESCRIPTION = (
    "Print a script that completes commands, flags, their values and files. To switch it on: "
    + "; ".join(line.split("  ")[0] for line in SHELLS.values())
    + "."
)
FILE_MARKS = ("_file", "_path", "hostfile", "script", "checkpoint_directory", "model_name")
FOLDER_MARKS = ("_dir",)


def completion_command(args: argparse.Namespace) -> None:
    """Print the script that completes `accelerate` in ``args.shell``."""
    print(make_script(args.shell))


def make_script(shell: str) -> str:
    """The script that completes `accelerate` in a shell; needs shtab."""
    require("shtab", "Completion in the shell")
    import shtab

    from accelerate.commands.accelerate_cli import COMMANDS, make_cli_parser

    parser = make_cli_parser([])
    for name, child in subcommands(parser).items():
        child.description = COMMANDS[name][1]
    for action in _actions(parser):
        kind = _path_kind(action)
        if kind is not None:
            action.complete = getattr(shtab, kind)  # type: ignore[attr-defined]
    return shtab.complete(parser, shell, root_prefix="accelerate")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from parser._actions
    for child in subcommands(parser).values():
        yield from _actions(child)


def _path_kind(action: argparse.Action) -> str | None:
    """Which of shtab's completions of paths an option takes, if it takes a path."""
    if action.nargs == 0 or action.choices:
        return None
    if action.dest.endswith(FILE_MARKS) or action.dest == "training_script_args":
        return "FILE"
    return "DIRECTORY" if action.dest.endswith(FOLDER_MARKS) else None


@parser_of("completion", DESCRIPTION, completion_command)
def completion_command_parser(parser: CustomArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="Your shell.")


main = entry_point(completion_command_parser, __name__)
