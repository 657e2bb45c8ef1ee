"""`accelerate config`: its parser and its subcommands."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from accelerate.base import ComputeEnvironment as ComputeEnvironment, expanded
from accelerate.commands.config.cluster import get_cluster_input as get_cluster_input
from accelerate.commands.config.default import default_command_parser
from accelerate.commands.config.sagemaker import get_sagemaker_input as get_sagemaker_input
from accelerate.commands.config.schema import schema_command_parser
from accelerate.commands.config.show import show_command_parser
from accelerate.commands.config.suggestions import Suggestions, suggest
from accelerate.commands.config.update import update_command_parser
from accelerate.commands.utils import make_parser, run_command
from accelerate.settings import (
    ClusterConfig,
    Prompt,
    SageMakerConfig,
    all_options,
    cache_dir as cache_dir,
    check,
    default_config_file as default_config_file,
    default_config_path,
    default_yaml_config_file as default_yaml_config_file,
    load_config_from_file as load_config_from_file,
    prompt_of_this_process,
    to_text,
    write_mapping,
)

WRITE, AGAIN, LEAVE = DECISIONS = ("write", "ask again", "leave")
description = "Create, update or show the configuration file that every command reads."


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of ``accelerate config`` without its subcommands.

    Args:
        subparsers: of `accelerate`; ``None`` for a parser of its own.
    """
    parser = make_parser("config", description, subparsers)
    parser.add_argument("--config_file", default=None, help="The file; default: the default one.")
    parser.set_defaults(func=config_command)
    return parser  # type: ignore[no-any-return]


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of ``accelerate config`` with its subcommands.

    Args:
        subparsers: of `accelerate`; ``None`` for a parser of its own.
    """
    parser = config_command_parser(subparsers)
    parent = argparse.ArgumentParser(add_help=False)
    children = parser.add_subparsers(title="subcommands", dest="subcommand")
    for add in (default_command_parser, update_command_parser, show_command_parser, schema_command_parser):
        add(children, [parent])
    return parser


def get_user_input(
    prompt: Prompt | None = None, suggestions: Suggestions | None = None
) -> ClusterConfig | SageMakerConfig:
    """Ask where scripts run, and then the questions that matter there.

    Args:
        prompt: asks; default: the terminal, or lines when this process has none.
        suggestions: the defaults; default: those for this machine.

    Returns:
        What the file will hold.

    Raises:
        ConfigurationError: on a pipe, an answer is wrong or missing.
    """
    chosen = prompt or prompt_of_this_process()
    known = suggestions or suggest()
    for fact in known.facts:
        chosen.say(fact)
    row = all_options()["compute_environment"]
    default = str(known.values.get(row.name, row.default))
    place = chosen.choose(str(row.ask), row.choices, default)
    ask = get_sagemaker_input if place == ComputeEnvironment.AMAZON_SAGEMAKER.value else get_cluster_input
    return ask(chosen, known)


def config_command(args: argparse.Namespace) -> None:
    """Ask all questions, show the file, and write it if the user agrees.

    Args:
        args: ``config_file``: where the file is written; ``None`` for the default place.

    Raises:
        ConfigurationError: on a pipe, an answer is wrong or missing.
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


def main() -> None:
    """Run as ``accelerate-config`` or ``python -m accelerate.commands.config``."""
    args = get_config_parser().parse_args()
    run_command(args.func, args)


if __name__ == "__main__":
    main()
