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


def make_parser(
    name: str,
    description: str,
    subparsers: Any = None,
    parser_class: type[argparse.ArgumentParser] | None = None,
    **kwargs: Any,
) -> Any:
    """A command's parser: a subcommand of `accelerate`, or one that stands alone.

    Args:
        name: of the subcommand.
        description: shown above the options.
        subparsers: of `accelerate`; ``None`` for a parser of its own.
        parser_class: default `CustomArgumentParser`.
        **kwargs: for the parser.
    """
    made = parser_class or CustomArgumentParser
    kwargs.setdefault("formatter_class", OneSpellingFormatter)
    if subparsers is None:
        return made(prog=f"accelerate {name}", description=description, **kwargs)
    # add_parser builds with the class that the subparsers object holds
    usual, subparsers._parser_class = subparsers._parser_class, made
    try:
        return subparsers.add_parser(name, prog=f"accelerate {name}", description=description, **kwargs)
    finally:
        subparsers._parser_class = usual


def run_command(command: Callable[[Any], object], args: argparse.Namespace) -> NoReturn:
    """Run a command and exit; our own errors are one message, not a traceback.

    Exit codes: 0 when all went well, 2 for wrong settings, 1 for other failures, 130 after Ctrl-C.
    """
    _print_everything()
    try:
        command(args)
        sys.stdout.flush()
    except AccelerateError as error:
        print(f"accelerate: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has seen enough, as in `accelerate env | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)


def _print_everything() -> None:
    """Escape characters that the output cannot take, such as parts of a path that are no UTF-8."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
