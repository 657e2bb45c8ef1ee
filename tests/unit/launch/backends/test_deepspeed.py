from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import ConfigurationError, patch_environment
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan
from accelerate.launch.backends import hostfile, launcher_for
from accelerate.launch.backends.hostfile import FILE_VARIABLE, variable_file
from accelerate.settings import FLAG, Layer, merge_layers

RUNNER = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts"]
SHARE = ["--num_nodes", "2", "--num_gpus", "4"]
ADDRESS = ["--master_addr", "10.0.0.1"]
END = ["--master_port", "5", "--no_local_rank", "train.py", "--lr", "1"]


SCRIPT = Target("script", "train.py", ("--lr", "1"))


def made(target: Target = SCRIPT, **more: Any) -> LaunchPlan:
    flags = {
        "use_deepspeed": True,
        "cpu": True,
        "num_processes": 8,
        "deepspeed_hostfile": "hosts",
        "deepspeed_multinode_launcher": "pdsh",
        "main_process_port": 5,
        **more,
    }
    machine = Machine(
        environ={}, port_in_use=lambda port: False, read_file=lambda path: "a slots=4\nb slots=4\n"
    )
    return resolve_plan(merge_layers(Layer(FLAG, flags)), machine, target)[0]


def words(**more: Any) -> list[str]:
    plan = made(**more)
    return launcher_for(plan).command(plan)


def test_pdsh_needs_no_address() -> None:
    assert words() == [*RUNNER, "--launcher", "pdsh", *SHARE, *END]
    assert words(main_process_ip="10.0.0.1") == [*RUNNER, "--launcher", "pdsh", *SHARE, *ADDRESS, *END]


@pytest.mark.parametrize("name", ["openmpi", "mpich", "mvapich"])
def test_each_kind_of_mpi_is_named(name: str) -> None:
    more = {"deepspeed_multinode_launcher": name, "main_process_ip": "10.0.0.1"}
    assert words(**more) == [*RUNNER, "--launcher", name, *ADDRESS, *END]
    assert made(**more, num_processes=None).processes == 8
    with pytest.raises(ConfigurationError, match="--num_processes=4: the launcher .* every slot of hosts"):
        made(**more, num_processes=4)
    with pytest.raises(ConfigurationError, match="filter='a': the launcher"):
        made(**more, deepspeed_inclusion_filter="a")


def test_slurm_is_named() -> None:
    assert words(deepspeed_multinode_launcher="slurm") == [*RUNNER, "--launcher", "slurm", *SHARE, *END]


def test_without_ssh_the_command_of_each_machine_has_its_rank() -> None:
    more = {"deepspeed_multinode_launcher": "nossh", "main_process_ip": "10.0.0.1", "machine_rank": 1}
    assert words(**more) == [*RUNNER, "--no_ssh", "--node_rank", "1", *SHARE, *ADDRESS, *END]


def test_the_standard_launcher_of_deepspeed_is_torchrun() -> None:
    more = {"deepspeed_multinode_launcher": "standard", "num_machines": 2, "main_process_ip": "127.0.0.1"}
    plan = made(**more)
    assert plan.launcher == "elastic"
    assert launcher_for(plan).command(plan)[0] == "torchrun"


@pytest.mark.parametrize(
    ("name", "flag"),
    [("deepspeed_inclusion_filter", "--include"), ("deepspeed_exclusion_filter", "--exclude")],
)
def test_a_filter_takes_the_place_of_counts(name: str, flag: str) -> None:
    assert words(**{name: "a:0,1@b"}) == [*RUNNER, "--launcher", "pdsh", flag, "a:0,1@b", *END]


@pytest.mark.parametrize(
    ("target", "kind"), [(Target("module", "a.b"), "--module"), (Target("program", "./a"), "--no_python")]
)
def test_modules_and_programs_keep_their_kind(target: Target, kind: str) -> None:
    plan = made(target)
    assert launcher_for(plan).command(plan)[-2:] == [kind, target.name]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"deepspeed_multinode_launcher": "openmpi"}, "the launcher openmpi needs it"),
        ({"deepspeed_multinode_launcher": "nossh"}, "the launcher nossh needs it"),
        ({"machine_rank": 1}, "the launcher pdsh starts all machines"),
        (
            {"deepspeed_inclusion_filter": "a", "deepspeed_exclusion_filter": "b"},
            "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other",
        ),
    ],
)
def test_unsupported_settings_are_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        made(**flags)
    assert problem in str(caught.value)


def test_the_file_of_variables_includes_the_file_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nMINE=1")
    with patch_environment(HOME=str(tmp_path)), variable_file({"B": "2", "SPACED": "a b"}) as path:
        assert path.read_text() == "NCCL_DEBUG=INFO\nMINE=1\nB=2\n"
    assert not path.exists()


def test_the_launcher_runs_with_the_file_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@"; cat "${FILE_VARIABLE}"; exit 3\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(hostfile.sys, "executable", str(program))
    plan = made(main_process_ip="10.0.0.1", zero_stage=2)
    assert launcher_for(plan).run(plan) == 3
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("-m deepspeed.launcher.runner --hostfile hosts --launcher pdsh")
    assert {"ACCELERATE_DEEPSPEED_ZERO_STAGE=2", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=5"} <= set(out[1:])
    assert any(line.startswith("PYTHONPATH=") and line.endswith(os.getcwd()) for line in out)
