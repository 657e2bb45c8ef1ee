"""The command `accelerate tpu-config`, which runs set-up commands on all hosts of a TPU pod by gcloud."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys

from accelerate.base import ConfigurationError, LaunchError
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser
from accelerate.launch import read_file
from accelerate.settings import (
    ClusterConfig,
    default_config_file as default_config_file,
    existing_file,
    find_config_file,
    load_config_from_file as load_config_from_file,
)

DESCRIPTION = "Run commands on every host of a TPU pod, as needed to set it up. Needs the gcloud program."
LATEST = "latest"


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Runs the commands on all hosts, or prints the command line with ``--debug``.

    Args:
        args: Arguments parsed by `tpu_command_parser`.

    Raises:
        ConfigurationError: Name, zone or commands are missing.
        LaunchError: gcloud is missing or failed.
    """
    command = _gcloud_command(args)
    if args.debug:
        print(f"Running {shlex.join(command)}")
        return
    if shutil.which(command[0]) is None:
        raise LaunchError(
            "gcloud was not found. Install the Google Cloud CLI, or use --debug to see the command."
        )
    sys.stdout.flush()
    code = subprocess.run(command, check=False).returncode
    if code:
        raise LaunchError(f"gcloud ended with exit code {code}; its message is above.")
    print("The TPU pod is set up.")


def _gcloud_command(args: argparse.Namespace) -> list[str]:
    loaded = load_config_from_file(args.config_file) if find_config_file(args.config_file) else None
    config = loaded if isinstance(loaded, ClusterConfig) else None
    name = args.tpu_name or (config.tpu_name if config else None)
    zone = args.tpu_zone or (config.tpu_zone if config else None)
    for flag, value in (("--tpu_name", name), ("--tpu_zone", zone)):
        if not value:
            raise ConfigurationError(f"{flag} is missing. Give it, or set it in the configuration file.")
    alpha = ["alpha"] if args.use_alpha else []
    ssh = ["compute", "tpus", "tpu-vm", "ssh", str(name), "--zone", str(zone)]
    return ["gcloud", *alpha, *ssh, "--command", "; ".join(_commands(args, config)), "--worker", "all"]


def _commands(args: argparse.Namespace, config: ClusterConfig | None) -> list[str]:
    """Returns the commands for each host, where flags take precedence over the configuration file."""
    file = args.command_file or (config.command_file if config and not args.command else None)
    given = [" ".join(words) for words in args.command or []]
    if file:
        lines = (line.strip() for line in read_file(str(existing_file("--command_file", file))).splitlines())
        commands = [*(line for line in lines if line and not line.startswith("#")), *given]
    else:
        commands = given or list(config.commands or [] if config else [])
    if args.install_accelerate:
        version = args.accelerate_version
        package = "-U accelerate" if version == LATEST else shlex.quote(f"accelerate=={version}")
        commands.insert(0, f"pip install {package}")
    if not commands:
        raise ConfigurationError(
            "There is nothing to run. Give --command, --command_file or --install_accelerate."
        )
    return commands


def tpu_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate tpu-config``, added to `subparsers` if given."""
    parser = make_parser("tpu-config", DESCRIPTION, tpu_command_launcher, subparsers)
    config = parser.add_argument_group("Config Arguments", "Values that a configuration file can hold too.")
    config.add_argument("--config_file", help="Configuration file.")
    config.add_argument("--tpu_name", help="Name of the TPU.")
    config.add_argument("--tpu_zone", help="Zone of the TPU.")
    pod = parser.add_argument_group("TPU Arguments", "What is run on each host.")
    pod.add_argument("--use_alpha", action="store_true", help="Use gcloud alpha instead of gcloud.")
    pod.add_argument("--command_file", help="File with a command on each line.")
    pod.add_argument(
        "--command", action="append", nargs="+", help="A command; may be given several times, in their order."
    )
    pod.add_argument("--install_accelerate", action="store_true", help="Install accelerate first.")
    pod.add_argument(
        "--accelerate_version", default=LATEST, help="Which version is installed: latest, or a number."
    )
    pod.add_argument("--debug", action="store_true", help="Print the command and run nothing.")
    return parser


main = entry_point(tpu_command_parser, __name__)
