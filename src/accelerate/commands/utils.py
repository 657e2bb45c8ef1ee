"""Import path of the parser classes, and how every command ends on an error."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, NoReturn

from accelerate.base import AccelerateError, ConfigurationError
from accelerate.settings import (
    CustomArgumentGroup as CustomArgumentGroup,
    CustomArgumentParser as CustomArgumentParser,
    OneSpellingFormatter,
)

_DEVICES = ("hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xpu")
DEVICE_PROBES = tuple(f"is_{device}_available" for device in _DEVICES)
"""Names of `accelerate.devices` that can be imported from several commands too."""

PARSER_DOCSTRING = """The parser of ``accelerate {}``.

Args:
    subparsers: of `accelerate`; ``None`` for a parser of its own.

Returns:
    The parser, whose default ``func`` runs the command.
"""


def parser_of(
    name: str,
    description: str,
    command: Callable[[argparse.Namespace], object] | None = None,
    parser_class: type[CustomArgumentParser] = CustomArgumentParser,
    **kwargs: Any,
) -> Callable[[Callable[[CustomArgumentParser], None]], Callable[..., CustomArgumentParser]]:
    """Turn a function that adds the options of a command into the one that makes its parser.

    The parser calls `command` with the parsed arguments; ``None`` where a subcommand is called.
    """
    kwargs = {"formatter_class": OneSpellingFormatter, "description": description, **kwargs}

    def decorate(add_options: Callable[[CustomArgumentParser], None]) -> Callable[..., CustomArgumentParser]:
        def make(subparsers: Any = None) -> CustomArgumentParser:
            if subparsers is None:
                parser = parser_class(prog=f"accelerate {name}", **kwargs)
            else:  # add_parser builds with the class that the subparsers object holds
                usual, subparsers._parser_class = subparsers._parser_class, parser_class
                try:
                    parser = subparsers.add_parser(name, prog=f"accelerate {name}", **kwargs)
                finally:
                    subparsers._parser_class = usual
            if command is not None:
                parser.set_defaults(func=command)
            add_options(parser)
            return parser

        make.__module__, make.__name__ = add_options.__module__, add_options.__name__
        make.__qualname__, make.__doc__ = add_options.__qualname__, PARSER_DOCSTRING.format(name)
        return make

    return decorate


def entry_point(make: Callable[[], argparse.ArgumentParser], module: str) -> Callable[[], NoReturn]:
    """Return the `main` of a command, which parses the command line, runs the command and exits.

    It is called at once where the `__name__` of its module says that this is the program (``python -m``).
    """

    def main() -> NoReturn:
        """Run the command as a program of its own, or by ``python -m``."""
        args = make().parse_args()
        run_command(args.func, args)

    if module == "__main__":
        main()
    return main


def run_command(command: Callable[[Any], object], args: argparse.Namespace) -> NoReturn:
    """Run a command and exit; our own errors are one message, not a traceback.

    Exit codes: 0 when all went well, 2 for wrong settings, 1 for other failures, 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # escape what cannot be encoded, as parts of paths not in UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command(args)
        sys.stdout.flush()
    except AccelerateError as error:
        print(f"accelerate: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader closed the pipe, as in `accelerate env | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)
