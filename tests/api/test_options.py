"""Every flag, configuration key and environment variable is in its golden list, and no other."""

import argparse
from dataclasses import fields

import pytest

from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.settings import SECTIONS, ClusterConfig, SageMakerConfig

from .conftest import load_golden


def list_flags(parser, command="accelerate"):
    """Return each command's flags with the attribute that each is stored under."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found.update(list_flags(below, f"{command} {name}"))
            continue
        found.setdefault(command, {}).update(dict.fromkeys(action.option_strings, action.dest))
    return found


def list_config_keys():
    """Return the keys of a configuration file: those of the top level, and those of each group."""
    keys = {"cluster": {field.name for field in fields(ClusterConfig)}}
    keys["sagemaker"] = {field.name for field in fields(SageMakerConfig)}
    for section in SECTIONS:
        keys.setdefault(section.file_key or "options", set()).update(
            row.key for row in section.options() if row.key is not None
        )
    return {where: sorted(names) for where, names in sorted(keys.items()) if names}


def list_variables():
    """Return the environment variables between launcher and worker."""
    rows = [row for section in SECTIONS for row in section.options()]
    return sorted({name for row in rows for name in row.variables + row.aliases})


LISTS = {
    "flags": lambda: list_flags(make_cli_parser([])),
    "config_keys": list_config_keys,
    "variables": list_variables,
}


@pytest.mark.parametrize("name", LISTS)
def test_options_are_those_of_the_golden_list(name):
    assert LISTS[name]() == load_golden(name), (
        f"bring tests/api/golden/{name}.json up to date, if this is meant"
    )
