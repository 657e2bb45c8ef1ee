"""The command `accelerate to-fsdp2`, which converts a configuration file of FSDP 1 to FSDP 2."""

from __future__ import annotations

import argparse
import os
from typing import Any

from accelerate.base import ConfigurationError, expanded, wrong_value
from accelerate.commands.utils import Subparsers, entry_point, make_parser
from accelerate.settings import (
    ARGUMENT_KEY_MAPPING as ARGUMENT_KEY_MAPPING,
    ARGUMENT_VALUE_MAPPING as ARGUMENT_VALUE_MAPPING,
    ConversionStatus as ConversionStatus,
    CustomArgumentParser as CustomArgumentParser,
    convert_config_to_fsdp2 as convert_config_to_fsdp2,
    existing_file,
    fsdp2_notes,
    read_mapping,
    write_mapping,
)

DESCRIPTION = "Convert a configuration file of FSDP 1 to FSDP 2, and print what has no counterpart."


def load_config(config_file: str) -> dict[str, Any]:
    """Returns the content of a YAML or JSON file without conversion.

    Raises:
        ConfigurationError: The file is missing, cannot be read, or has no settings.
    """
    return read_mapping(expanded(config_file))


def _validate_to_fsdp2_args(args: argparse.Namespace) -> None:
    """Raises an error if no output file is given, or if it exists and `--overwrite` is not given."""
    existing_file("--config_file", args.config_file)
    if args.output_file is None and not args.overwrite:
        raise ConfigurationError("Give --output_file, or --overwrite to replace the file itself.")
    if args.output_file is not None and os.path.exists(expanded(args.output_file)) and not args.overwrite:
        fix = "Choose another, or add --overwrite"
        raise wrong_value("--output_file", args.output_file, "there is a file already", fix)


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Converts the file, writes the result and prints notes about the changes.

    Args:
        args: Arguments with ``config_file``, ``output_file`` and ``overwrite``.

    Raises:
        ConfigurationError: The arguments or the file are not valid.
    """
    _validate_to_fsdp2_args(args)
    old = load_config(args.config_file)
    new = convert_config_to_fsdp2(old)
    target = expanded(args.output_file or args.config_file)
    write_mapping(target, new)
    for note in fsdp2_notes(old):
        print(f"accelerate to-fsdp2: {note}.")
    print(f"The configuration for FSDP 2 was written to {target}.")


def to_fsdp2_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate to-fsdp2``, added to `subparsers` if given."""
    parser = make_parser("to-fsdp2", DESCRIPTION, to_fsdp2_command, subparsers)
    add = parser.add_argument
    add("--config_file", required=True, help="The file for FSDP 1.")
    add("--overwrite", action="store_true", help="Replace the output file, or the file itself without one.")
    add("--output_file", help="Path of the new file.")
    return parser


main = entry_point(to_fsdp2_command_parser, __name__)
