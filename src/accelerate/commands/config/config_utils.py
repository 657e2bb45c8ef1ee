"""Functions that build the parsers of the subcommands of `accelerate config`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from accelerate.base import (
    ComputeEnvironment as ComputeEnvironment,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    FP8BackendType as FP8BackendType,
    PrecisionType as PrecisionType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accelerate.commands.menu import BulletMenu as BulletMenu
from accelerate.commands.utils import Subparsers
from accelerate.settings import OneSpellingFormatter
from accelerate.settings.sections import BACKENDS

_LATER = ("no", "torchxla_trace_once", "hpu_backend", "neuron")
DYNAMO_BACKENDS = [name.upper() for name in BACKENDS if name not in _LATER]


class SubcommandHelpFormatter(OneSpellingFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter of the help of a subcommand, with a usage line without the usage of its parents."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None
    ) -> str:
        text = super()._format_usage(usage, actions, groups, prefix)
        return text.replace("<command> [<args>] ", "")


def add_subcommand(
    subparsers: Subparsers,
    parents: list[argparse.ArgumentParser],
    name: str,
    description: str,
    command: Callable[[argparse.Namespace], object],
    help: str | None = None,
) -> argparse.ArgumentParser:
    """Adds a subcommand to ``accelerate config``, which has the options of `parents`, too."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        parents=parents,
        help=help or description,
        description=description,
        formatter_class=SubcommandHelpFormatter,
    )
    parser.set_defaults(func=command)
    return parser


def add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", default=None, help="The file; default: the default one.")
