"""What a plan is made of, its command lines, and how its processes record what ends them."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import patch_environment
from accelerate.base.errors import ConfigurationError
from accelerate.commands.launch import launch_command_parser
from accelerate.launch import (
    FOLDER_VARIABLE,
    LAUNCH_COMMAND,
    LaunchPlan,
    Target,
    env_var_path_add,
    is_run_id,
    local_command,
    new_run_id,
    record_failures,
)
from accelerate.launch.failures import ENTRY, VERBOSE_VARIABLE
from accelerate.launch.plan import accelerate_command, folder_of, torchrun_arguments
from accelerate.settings import FLAG, Layer, Option, all_options, flags, merge_layers
from accelerate.settings.sections import RendezvousSection


def command_line(**given: bool) -> Namespace:
    flags = {"module": False, "no_python": False, **given}
    return Namespace(**flags, training_script="train", training_script_args=["--lr", "1"])


def test_a_target_is_a_script_a_module_or_a_program() -> None:
    assert Target.of(command_line()) == Target("script", "train", ("--lr", "1"))
    assert Target.of(command_line(module=True)) == Target("module", "train", ("--lr", "1"))
    assert Target.of(command_line(no_python=True)) == Target("program", "train", ("--lr", "1"))
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Target.of(command_line(module=True, no_python=True))


def test_details_are_those_of_the_launcher_that_made_the_plan() -> None:
    plan = LaunchPlan("mine", Target("script", "train"), details="details")
    assert plan.detail(str) == "details"
    with pytest.raises(TypeError, match="a plan of the mine launcher holds no int"):
        plan.detail(int)


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


def test_torchrun_receives_the_layout_and_the_rendezvous() -> None:
    rendezvous = RendezvousSection(
        rdzv_conf="timeout=9", max_restarts=2, monitor_interval=0.5, role="trainer", tee="3", log_dir="/logs"
    )
    plan = LaunchPlan("elastic", Target("script", "a.py"), 6, 2, 1, rendezvous, "10.0.0.1", 5)
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


def test_an_elastic_rendezvous_has_an_endpoint() -> None:
    rendezvous = RendezvousSection(rdzv_backend="c10d")
    words = torchrun_arguments(
        LaunchPlan("elastic", Target("script", "a.py"), 2, rendezvous=rendezvous, address="host", port=5)
    )
    assert words[words.index("--rdzv_endpoint") + 1] == "host:5"
    assert "--master_addr" not in words


def test_a_folder_is_appended_to_a_search_path() -> None:
    with patch_environment(SAMPLE_PATH="/a:/b"):
        assert env_var_path_add("SAMPLE_PATH", "/c") == "/a:/b:/c"
    with patch_environment(SAMPLE_PATH="/a::/b:"):
        assert env_var_path_add("SAMPLE_PATH", "/c") == "/a:/b:/c"
    assert env_var_path_add("SAMPLE_PATH", "/c") == "/c"


WRITTEN = [row for row in all_options().values() if row.flags and not row.secret and row.name != "monitor"]


def another_value(row: Option) -> Any:
    if choices := row.choices or row.words:
        read = [row.read(choice, "") for choice in choices]
        return next((value for value in read if value != row.default), read[0])
    values = {bool: not row.default, int: 2, float: 0.5, str: "--a b=c"}
    return ("x", "y=z") if row.action == "append" else values.get(row.kind, row.default)


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: row.name)
def test_arguments_for_another_machine_parse_to_the_same_value(row: Option) -> None:
    settings = merge_layers(Layer(FLAG, {row.name: another_value(row)}))
    words = accelerate_command(settings, Target("module", "a.b", ("--c",)))
    assert words[: len(LAUNCH_COMMAND)] == list(LAUNCH_COMMAND)
    parsed = launch_command_parser().parse_args(words[3:])
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (True, "a.b", ["--c"])
    assert merge_layers(flags.layer(parsed)).values[row.name] == settings.values[row.name]


def test_another_machine_shows_no_live_view() -> None:
    settings = merge_layers(Layer(FLAG, {"monitor": True}))
    assert "--monitor" not in accelerate_command(settings, Target("script", "a.py", ()))


def test_secrets_are_not_passed_as_arguments() -> None:
    assert flags.words(merge_layers(Layer(FLAG, {"aws_secret_access_key": "hush"}))) == []


def make_plan(target: Target, launcher: str = "local", **meeting: str) -> LaunchPlan:
    return LaunchPlan(
        launcher=launcher,
        target=target,
        processes=1,
        machines=1,
        machine=0,
        rendezvous=RendezvousSection(**meeting),  # type: ignore[arg-type]
        environment={"A": "b"},
    )


def test_scripts_and_modules_are_started_by_the_entry() -> None:
    plan = record_failures(make_plan(Target("script", "train.py", ("--lr", "1"))), Path("here"))
    assert plan.target == Target("script", str(ENTRY), ("train.py", "--lr", "1"))
    assert is_run_id(plan.environment["ACCELERATE_RUN_ID"])
    assert plan.environment == {**plan.environment, "A": "b", FOLDER_VARIABLE: "here"}
    assert len(plan.environment) == 4
    module = record_failures(make_plan(Target("module", "pkg.train", ("x",)), "elastic"), Path("here"))
    assert module.target.arguments == ("-m", "pkg.train", "x")


def test_replica_groups_have_the_run_of_their_launcher_and_other_launches_their_own() -> None:
    run_id = new_run_id()
    for variables, is_kept in (({"ACCELERATE_REPLICA": "1"}, True), ({}, False)):
        with patch_environment(ACCELERATE_RUN_ID=run_id, **variables):
            plan = record_failures(make_plan(Target("script", "x")), Path("here"))
        assert (plan.environment["ACCELERATE_RUN_ID"] == run_id) is is_kept
    assert new_run_id() != run_id


@pytest.mark.parametrize(
    ("kind", "launcher"), [("program", "local"), ("script", "mpi"), ("script", "sagemaker")]
)
def test_plans_of_other_launchers_are_not_recorded(kind: str, launcher: str) -> None:
    plan = make_plan(Target(kind, "x"), launcher)  # type: ignore[arg-type]
    assert record_failures(plan, Path("here")) is plan


def test_kept_logs_hold_whole_tracebacks() -> None:
    for meeting in ({"log_dir": "logs"}, {"tee": "3"}):
        plan = record_failures(make_plan(Target("script", "x"), **meeting), Path("here"))
        assert plan.environment[VERBOSE_VARIABLE] == "1"


def test_the_folder_is_that_of_a_recorded_plan() -> None:
    plan = make_plan(Target("script", "x"))
    assert folder_of(record_failures(plan, Path("here"))) == Path("here")
    assert folder_of(plan) is None
