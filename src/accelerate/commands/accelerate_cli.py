"""Entry point of the `accelerate` command, which imports only the module of the requested subcommand."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from accelerate.base import attach
from accelerate.commands.utils import run_command
from accelerate.settings import CustomArgumentParser

COMMANDS = {
    "checkpoint": ("checkpoint:checkpoint_command_parser", "List, verify, compare and prune checkpoints."),
    "clients": (
        "clients:clients_command_parser",
        "List the installed libraries that use accelerate, and whether they accept this package.",
    ),
    "config": ("config:get_config_parser", "Create, update or show the configuration file."),
    "completion": (
        "completion:completion_command_parser",
        "Print the completion of this command line for bash, zsh or fish.",
    ),
    "env": ("env:env_command_parser", "Show versions, devices and configuration."),
    "estimate-memory": (
        "estimate:estimate_command_parser",
        "Estimate how much memory a model needs, without loading it.",
    ),
    "launch": ("launch:launch_command_parser", "Run a script on one or several processes."),
    "merge-weights": ("merge:merge_command_parser", "Merge a sharded checkpoint into whole weights."),
    "monitor": (
        "monitor:monitor_command_parser",
        "Show a run in the terminal during the run, or after its end.",
    ),
    "report": ("report:report_command_parser", "Write one page about a run, or about several side by side."),
    "test": ("test:test_command_parser", "Check that training works on this machine."),
    "to-fsdp2": ("to_fsdp2:to_fsdp2_command_parser", "Write a configuration file of FSDP 1 for FSDP 2."),
    "tpu-config": ("tpu:tpu_command_parser", "Run set-up commands on all hosts of a TPU pod."),
    "verify": (
        "verify:verify_command_parser",
        "Check that a script trains with a launch what one process trains.",
    ),
}
"""Name -> `module:function` of this package that builds the parser, and the summary of the command."""

_BUILDERS = {name: builder.split(":") for name, (builder, _) in COMMANDS.items()}

# The builders can be imported from here, too. Each is loaded on first use.
__getattr__, __dir__, _ = attach(
    __name__, {f"accelerate.commands.{module}": (function,) for module, function in _BUILDERS.values()}
)


class _Version(argparse.Action):
    """Flag that prints the version, which is read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # slow, and few programs ask

        print(f"accelerate {version('accelerate')}")
        parser.exit()


def make_cli_parser(words: list[str]) -> CustomArgumentParser:
    """Returns the parser of `accelerate`, with the subcommands that these arguments need."""
    parser = CustomArgumentParser(
        prog="accelerate",
        usage="accelerate <command> [<args>]",
        allow_abbrev=False,
        description="Train with PyTorch on one CPU, many GPUs or many machines.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="Print the version and exit.")
    subparsers: Any = parser.add_subparsers(
        metavar="<command>", title="commands", parser_class=CustomArgumentParser
    )
    needed = list(COMMANDS)
    if words and words[0] in COMMANDS:
        needed = [words[0]]
    elif words and words[0] in ("-h", "--help"):
        needed = []
    for name in needed:
        module, function = _BUILDERS[name]
        getattr(import_module(f"accelerate.commands.{module}"), function)(subparsers)
    # The help lists all commands without importing them.
    subparsers._choices_actions.clear()
    for name, (_, summary) in COMMANDS.items():
        subparsers._choices_actions.append(subparsers._ChoicesPseudoAction(name, (), summary))
    return parser


def main() -> None:
    """Runs the ``accelerate`` command."""
    words = sys.argv[1:]
    parser = make_cli_parser(words)
    args = parser.parse_args()
    if not hasattr(args, "func"):
        parser.print_help()
        sys.exit(1)
    run_command(args.func, args)


if __name__ == "__main__":
    main()
