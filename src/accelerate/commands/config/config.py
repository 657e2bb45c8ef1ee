"""The command `accelerate config`, which asks for settings and writes the configuration file.

Its subcommands are default, update, show and schema.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from accelerate.base import ComputeEnvironment as ComputeEnvironment, expanded
from accelerate.commands.config.cluster import Suggestions, get_cluster_input as get_cluster_input, suggest
from accelerate.commands.config.config_utils import add_config_file, add_subcommand
from accelerate.commands.config.default import default_command_parser
from accelerate.commands.config.sagemaker import get_sagemaker_input as get_sagemaker_input
from accelerate.commands.config.update import update_command_parser
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser
from accelerate.settings import (
    SCHEMA_FILE,
    ClusterConfig,
    Prompt,
    SageMakerConfig,
    all_options,
    cache_dir as cache_dir,
    check,
    default_config_file as default_config_file,
    default_config_path,
    default_yaml_config_file as default_yaml_config_file,
    find_config_file,
    load_config_from_file as load_config_from_file,
    prompt_of_this_process,
    to_text,
    write_mapping,
)

WRITE, AGAIN, LEAVE = DECISIONS = ("write", "ask again", "leave")
description = "Create, update or show the configuration file that every command reads."
SHOW = "Show the configuration file that the other commands read."
SCHEMA = (
    "Print the path of the JSON Schema of the configuration file, with which editors complete and check it. "
    "In VS Code and others with a YAML language server, make this the first line of the file: "
    "# yaml-language-server: $schema=PATH"
)


def get_user_input(
    prompt: Prompt | None = None, suggestions: Suggestions | None = None
) -> ClusterConfig | SageMakerConfig:
    """Asks for the compute environment, and then the questions for this environment.

    Args:
        prompt: Prompt that asks. Default: the terminal, or lines of the standard input without one.
        suggestions: Defaults of the answers. Default: those for this machine.

    Returns:
        The settings for the file.

    Raises:
        ConfigurationError: The input is a pipe, and an answer is wrong or missing.
    """
    prompt = prompt or prompt_of_this_process()
    known = suggestions or suggest()
    for fact in known.facts:
        prompt.say(fact)
    row = all_options()["compute_environment"]
    default = str(known.values.get(row.name, row.default))
    environment = prompt.choose(str(row.ask), row.choices, default)
    ask = (
        get_sagemaker_input if environment == ComputeEnvironment.AMAZON_SAGEMAKER.value else get_cluster_input
    )
    return ask(prompt, known)


def config_command(args: argparse.Namespace) -> None:
    """Asks all questions, prints the file, and writes it if the user agrees.

    Args:
        args: Arguments with ``config_file``, the path of the file. ``None`` for the default file.

    Raises:
        ConfigurationError: The input is a pipe, and an answer is wrong or missing.
    """
    path = expanded(args.config_file) if args.config_file else default_config_path()
    prompt = prompt_of_this_process()
    known = suggest(str(path) if os.path.isfile(path) else None)
    while True:
        config = get_user_input(prompt, known)
        prompt.say(f"\n{to_text(config.to_dict())}")
        decision = prompt.choose(f"Write this to {path}?", DECISIONS, WRITE)
        if decision != AGAIN:
            break
        known = replace(known, values={**known.values, **check(config.to_dict(), path)}, facts=())
    if decision == LEAVE:
        prompt.say("Nothing was written.")
        return
    write_mapping(path, config.to_dict())
    prompt.say(f"The configuration was written to {path}.")


def show_config_command(args: argparse.Namespace) -> None:
    """Prints the path of the file ``args.config_file`` and its settings in the current format."""
    config = load_config_from_file(args.config_file)
    print(f"# {find_config_file(args.config_file)}")
    print(to_text(config.to_dict()), end="")


def schema_command(args: argparse.Namespace) -> None:
    print(SCHEMA_FILE)


def config_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate config``, added to `subparsers` if given."""
    parser = make_parser("config", description, config_command, subparsers)
    add_config_file(parser)
    return parser


def get_config_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate config``, with its subcommands."""
    parser = config_command_parser(subparsers)
    parent = argparse.ArgumentParser(add_help=False)
    children = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(children, [parent])
    update_command_parser(children, [parent])
    add_config_file(add_subcommand(children, [parent], "show", SHOW, show_config_command))
    add_subcommand(children, [parent], "schema", SCHEMA, schema_command, SCHEMA.partition(",")[0] + ".")
    return parser


main = entry_point(get_config_parser, __name__)
