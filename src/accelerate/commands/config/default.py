"""The command `accelerate config default`, which writes a file with the devices of this machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from accelerate.base import ComputeEnvironment, DistributedType, attach, environ, expanded, wrong_value
from accelerate.commands.config.config_utils import (
    SubcommandHelpFormatter as SubcommandHelpFormatter,
    add_subcommand,
)
from accelerate.commands.utils import DEVICE_PROBES, Subparsers
from accelerate.launch import look
from accelerate.settings import (
    ClusterConfig,
    default_config_file,
    default_json_config_file as default_json_config_file,
    write_mapping,
)
from accelerate.settings.sections import PRECISIONS

__getattr__, __dir__, _ = attach(__name__, {"accelerate.devices": DEVICE_PROBES})

description = "Create a default config file for Accelerate with only a few flags set."


def write_basic_config(mixed_precision: str = "no", save_location: str = default_config_file) -> Path | bool:
    """Writes a configuration file for all devices of this machine, or for its CPU.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        save_location: Path of the file, ``.yaml`` or ``.json``. Missing folders are created.

    Returns:
        The path of the file, or ``False`` if a file exists already, which is not changed.

    Raises:
        ConfigurationError: The precision is unknown.
    """
    precision = mixed_precision.lower()
    if precision not in PRECISIONS:
        fix = f"Use one of {', '.join(PRECISIONS)}"
        raise wrong_value("mixed_precision", mixed_precision, "it is not a known precision", fix)
    path = expanded(save_location)
    if os.path.exists(path):
        print(f"{path} exists already and is not changed. Remove it to write a new one.")
        return False
    machine = look(environ.current(), cpu=False)
    several = machine.has_accelerator and machine.devices > 1
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=machine.hardware.distributed_type if several else DistributedType.NO,
        mixed_precision=precision,
        use_cpu=not machine.has_accelerator,
        debug=False,
        num_processes=machine.devices,
    )
    write_mapping(path, config.to_dict())
    return path


def default_command_parser(
    parser: Subparsers, parents: list[argparse.ArgumentParser]
) -> argparse.ArgumentParser:
    """Adds the subcommand, which has the options of `parents`, too."""
    child = add_subcommand(parser, parents, "default", description, default_config_command)
    child.add_argument(
        "--config_file",
        default=default_config_file,
        dest="save_location",
        help="Path of the file; default: the path that every command reads.",
    )
    child.add_argument(
        "--mixed_precision",
        choices=["no", "fp16", "bf16"],
        default="no",
        help="Mixed precision of the forward pass.",
    )
    return child


def default_config_command(args: argparse.Namespace) -> None:
    """Writes the file and prints its path."""
    if path := write_basic_config(args.mixed_precision, args.save_location):
        print(f"The configuration was written to {path}.")
