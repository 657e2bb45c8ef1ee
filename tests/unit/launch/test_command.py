from __future__ import annotations

import sys
from typing import Any

import pytest

from accelerate.base import patch_environment
from accelerate.commands.launch import launch_command_parser
from accelerate.launch import (
    AGENT,
    LaunchPlan,
    Rendezvous,
    Target,
    accelerate_command,
    env_var_path_add,
    local_command,
    torchrun_arguments,
)
from accelerate.settings import FLAG, Layer, Option, all_options, flags, merge_layers

ARGUMENTS = ("--help", "--", "-m", "x y")


def test_each_kind_of_target_has_its_command() -> None:
    assert local_command(Target("script", "a.py", ARGUMENTS)) == [sys.executable, "a.py", *ARGUMENTS]
    assert local_command(Target("module", "a.b", ARGUMENTS)) == [sys.executable, "-m", "a.b", *ARGUMENTS]
    assert local_command(Target("program", "a", ARGUMENTS)) == ["a", *ARGUMENTS]


@pytest.mark.parametrize(
    ("kind", "switch"), [("script", []), ("module", ["--module"]), ("program", ["--no_python"])]
)
def test_torchrun_gets_the_target_last(kind: str, switch: list[str]) -> None:
    words = torchrun_arguments(LaunchPlan("elastic", Target(kind, "a", ARGUMENTS), processes=2))  # type: ignore[arg-type]
    assert words[-len(ARGUMENTS) - 1 - len(switch) :] == [*switch, "a", *ARGUMENTS]


def test_torchrun_is_told_the_layout_and_the_meeting() -> None:
    meeting = Rendezvous("static", "10.0.0.1", 5, "timeout=9", 2, 0.5, "trainer", "3", "/logs")
    plan = LaunchPlan(
        "elastic", Target("script", "a.py"), processes=6, machines=2, machine=1, rendezvous=meeting
    )
    pairs = dict(zip(torchrun_arguments(plan)[:-1:2], torchrun_arguments(plan)[1:-1:2], strict=True))
    assert pairs == {
        "--nnodes": "2",
        "--nproc_per_node": "3",
        "--node_rank": "1",
        "--rdzv_endpoint": "10.0.0.1:5",
        "--rdzv_backend": "static",
        "--rdzv_conf": "timeout=9",
        "--max_restarts": "2",
        "--monitor_interval": "0.5",
        "--role": "trainer",
        "--tee": "3",
        "--log_dir": "/logs",
    }


def test_an_elastic_meeting_has_an_endpoint() -> None:
    meeting = Rendezvous("c10d", "host", 5)
    words = torchrun_arguments(
        LaunchPlan("elastic", Target("script", "a.py"), processes=2, rendezvous=meeting)
    )
    assert words[words.index("--rdzv_endpoint") + 1] == "host:5"
    assert "--master_addr" not in words


def test_a_folder_goes_to_the_end_of_a_search_path() -> None:
    with patch_environment(SAMPLE_PATH="/a:/b"):
        assert env_var_path_add("SAMPLE_PATH", "/c") == "/a:/b:/c"
    assert env_var_path_add("SAMPLE_PATH", "/c") == "/c"


WRITTEN = [row for row in all_options().values() if row.flags and not row.secret]


def another_value(row: Option) -> Any:
    if row.choices:
        read = [row.read(choice, "") for choice in row.choices]
        return next((value for value in read if value != row.default), read[0])
    values = {bool: not row.default, int: 2, float: 0.5, str: "--a b=c"}
    return ("x", "y=z") if row.action == "append" else values.get(row.kind, row.default)


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: row.name)
def test_words_for_another_machine_give_the_same_value_there(row: Option) -> None:
    settings = merge_layers(Layer(FLAG, {row.name: another_value(row)}))
    words = accelerate_command(settings, Target("module", "a.b", ("--c",)))
    assert words[: len(AGENT)] == list(AGENT)
    parsed = launch_command_parser().parse_args(words[3:])
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (True, "a.b", ["--c"])
    assert merge_layers(flags.layer(parsed)).values[row.name] == settings.values[row.name]


def test_secrets_are_no_words() -> None:
    assert flags.words(merge_layers(Layer(FLAG, {"aws_secret_access_key": "hush"}))) == []
