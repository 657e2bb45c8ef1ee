"""PET_* variables: read by `accelerate launch`, weaker than its flags, stronger than files and variables."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.base import ConfigurationError, patch_environment
from accelerate.commands.launch import launch_command_parser, make_plan, read_settings
from accelerate.launch import LaunchPlan
from accelerate.settings import Settings, env

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


def settings(environ: dict[str, str], *words: str) -> Settings:
    with patch_environment(**environ):
        return read_settings(launch_command_parser().parse_args([*words, "train.py"]))


def plan(environ: dict[str, str], *words: str) -> LaunchPlan:
    with patch_environment(**environ):
        return make_plan(launch_command_parser().parse_args([*words, "train.py"]))[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--num_processes", "8"], (8, 2, 1)),
        (["--machine_rank", "0"], (6, 2, 0)),
        (["--num_machines", "3"], (9, 3, 1)),
        (["--num_machines", "1"], (3, 1, 0)),
        (["--num_machines", "1", "--num_processes", "4"], (4, 1, 0)),
        (["--processes_per_machine", "4,1"], (5, 2, 1)),
    ],
)
def test_flags_override_torchrun_variables(words: list[str], expected: tuple[int, int, int]) -> None:
    made = plan(KUBEFLOW, "--cpu", *words)
    assert (made.processes, made.machines, made.machine) == expected


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("PET_NNODES", "2:2", "num_machines", 2),
        ("PET_NNODES", "1:3", "num_machines", 3),
        ("PET_NNODES", "1:3", "nnodes", "1:3"),
        ("PET_RDZV_ENDPOINT", "host:1234", "main_process_ip", "host"),
        ("PET_RDZV_ENDPOINT", "host:1234", "main_process_port", 1234),
        ("PET_RDZV_ENDPOINT", "host", "main_process_ip", "host"),
        ("PET_RDZV_ENDPOINT", "[fe80::1]:1234", "main_process_ip", "fe80::1"),
        ("PET_RDZV_ENDPOINT", "[fe80::1]", "main_process_port", None),
        ("PET_RDZV_BACKEND", "c10d", "rdzv_backend", "c10d"),
        ("PET_RDZV_CONF", "timeout=9", "rdzv_conf", "timeout=9"),
        ("PET_MAX_RESTARTS", "3", "max_restarts", 3),
        ("PET_MONITOR_INTERVAL", "0.5", "monitor_interval", 0.5),
        ("PET_ROLE", "trainer", "role", "trainer"),
        ("PET_LOG_DIR", "logs", "log_dir", "logs"),
        ("PET_TEE", "3", "tee", "3"),
        ("PET_NPROC_PER_NODE", "gpu", "num_processes", None),
        ("PET_NNODES", "", "num_machines", 1),
    ],
)
def test_each_variable(variable: str, text: str, name: str, value: Any) -> None:
    found = settings({variable: text})
    assert found.values[name] == value
    given = bool(text) and not (text == "[fe80::1]" and name == "main_process_port")
    assert found.source(name) == (variable if given else "built-in")


def test_one_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.os, "cpu_count", lambda: 5)
    environ = {"PET_NPROC_PER_NODE": "cpu", "PET_NNODES": "2"}
    assert settings(environ).values["num_processes"] == 10


def test_the_parts_of_an_endpoint_are_more_exact() -> None:
    found = settings({**KUBEFLOW, "PET_RDZV_ENDPOINT": "other:1"})
    assert (found.values["main_process_ip"], found.values["main_process_port"]) == ("job-node-0-0.job", 29400)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PET_NNODES", "3:1", r"^PET_NNODES='3:1': it is neither a number .* Write for example 4, or 2:4"),
        ("PET_NNODES", "two", r"^PET_NNODES='two'"),
        ("PET_NPROC_PER_NODE", "0", r"^PET_NPROC_PER_NODE='0': at least one"),
        ("PET_NPROC_PER_NODE", "many", r"^PET_NPROC_PER_NODE='many'"),
        ("PET_MASTER_PORT", "70000", r"^PET_MASTER_PORT='70000'"),
        ("PET_RDZV_ENDPOINT", "host:port", r"^PET_RDZV_ENDPOINT='port'"),
    ],
)
def test_bad_values_are_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings({variable: text})


def test_a_value_that_a_flag_replaces_is_not_read() -> None:
    found = settings({"PET_NNODES": "bad"}, "--num_machines", "2")
    assert (found.values["num_machines"], found.values["nnodes"]) == (2, None)
    assert settings({"PET_NNODES": "bad"}, "--nnodes", "1:2").values["num_machines"] == 2


def test_the_processes_of_an_elastic_run_are_those_of_the_largest_size() -> None:
    environ = {"PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "2"}
    assert settings(environ).values["num_processes"] == 6
    assert settings({"PET_NPROC_PER_NODE": "2"}, "--nnodes", "2:4").values["num_processes"] == 8
