"""Functions that build the parser and the entry point of a command, and run it with one error message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, NoReturn, TypeAlias

from accelerate.base import AccelerateError, ConfigurationError
from accelerate.settings import (
    CustomArgumentGroup as CustomArgumentGroup,
    CustomArgumentParser as CustomArgumentParser,
    OneSpellingFormatter,
)

Subparsers: TypeAlias = "argparse._SubParsersAction[Any]"

_DEVICES = ("hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xpu")
DEVICE_PROBES = tuple(f"is_{device}_available" for device in _DEVICES)
"""Names of `accelerate.devices` that can be imported from several commands, too."""


def make_parser(
    name: str,
    description: str,
    command: Callable[[argparse.Namespace], object] | None,
    subparsers: Subparsers | None = None,
    parser_class: type[CustomArgumentParser] = CustomArgumentParser,
    **kwargs: Any,
) -> CustomArgumentParser:
    """Returns the parser of a command, without its options.

    Args:
        command: Function that is called with the parsed arguments. ``None`` if a subcommand is called.
        subparsers: Subparsers of `accelerate`, to which the parser is added. ``None`` for a separate parser.
    """
    kwargs = {
        "prog": f"accelerate {name}",
        "description": description,
        "formatter_class": OneSpellingFormatter,
        **kwargs,
    }
    if subparsers is None:
        parser = parser_class(**kwargs)
    else:  # add_parser uses the class of the subparsers object
        previous, subparsers._parser_class = subparsers._parser_class, parser_class
        try:
            parser = subparsers.add_parser(name, **kwargs)
        finally:
            subparsers._parser_class = previous
    if command is not None:
        parser.set_defaults(func=command)
    return parser


def entry_point(make: Callable[[], argparse.ArgumentParser], module: str) -> Callable[[], NoReturn]:
    """Returns the `main` of a command, which parses the command line, runs the command and exits.

    It is called at once if `module` is "__main__", as with ``python -m``.
    """

    def main() -> NoReturn:
        """Runs the command as a separate program or by ``python -m``."""
        args = make().parse_args()
        run_command(args.func, args)

    if module == "__main__":
        main()
    return main


def run_command(command: Callable[[Any], object], args: argparse.Namespace) -> NoReturn:
    """Runs a command and exits, with one message instead of a traceback for errors of this package.

    Exit codes are 0 for success, 2 for wrong settings, 1 for other failures, and 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # escapes characters that cannot be encoded, as in paths
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command(args)
        sys.stdout.flush()
    except AccelerateError as error:
        print(f"accelerate: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"accelerate: error: {error.filename} cannot be used: {error.strerror}.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader closed the pipe, as in `accelerate env | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)
