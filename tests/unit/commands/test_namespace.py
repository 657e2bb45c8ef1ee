from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import ConfigurationError, clear_environment, current
from accelerate.commands import namespace
from accelerate.commands.launch import launch_command_parser
from accelerate.launch import LaunchPlan, get_free_port
from accelerate.launch.backends import Launcher
from accelerate.launch.backends.elastic import ElasticLauncher, LocalLauncher
from accelerate.launch.backends.hostfile import DeepSpeedLauncher

OBSERVED = json.loads((Path(__file__).parents[2] / "samples" / "launch_environments.json").read_text())
BUILT = {name: seen for name, seen in OBSERVED.items() if hasattr(namespace, seen["function"])}
ADDED = {"megatron": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
"""Variables that `accelerate launch` sets, too, and that Megatron-LM requires."""


def decided(seen: dict[str, Any]) -> argparse.Namespace:
    args = launch_command_parser().parse_args([*seen["argv"], "script.py", "--x", "1"])
    vars(args).update(seen["preset_args"])
    return args


@pytest.mark.parametrize("name", sorted(BUILT))
def test_environments_are_those_of_the_interface(name: str) -> None:
    seen = BUILT[name]
    args = decided(seen)
    with clear_environment():
        made = getattr(namespace, seen["function"])(args)
        inherited = set(current())
    environment = made[1] if isinstance(made, tuple) else made
    added = {key: text for key, text in environment.items() if key not in inherited}
    expected = {key: text.replace("<cwd>", str(Path.cwd())) for key, text in seen["env"].items()}
    assert added == {**expected, **ADDED.get(name, {})}
    assert environment.keys() >= inherited


def test_a_module_and_a_program_exclude_each_other() -> None:
    args = decided(OBSERVED["simple_cpu"])
    args.module = args.no_python = True
    with pytest.raises(ConfigurationError, match="--module and --no_python exclude each other"):
        namespace.prepare_simple_launcher_cmd_env(args)


def test_the_namespace_gets_what_torchrun_needs() -> None:
    args = decided(OBSERVED["multi_gpu"])
    args.main_process_port = 0
    namespace.prepare_multi_gpu_env(args)
    assert args.nproc_per_node == "2"
    assert int(args.master_port) > 0

    args = decided(OBSERVED["multi_gpu"])
    vars(args).update(num_machines=2, machine_rank=1, main_process_ip="host", main_process_port=5)
    namespace.prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("1", "2", "1")
    assert args.rdzv_endpoint == "host:5"

    args.same_network = True
    namespace.prepare_multi_gpu_env(args)
    assert (args.master_addr, args.master_port) == ("host", "5")


def test_several_machines_give_the_simple_launcher_an_address() -> None:
    args = decided(OBSERVED["simple_cpu"])
    vars(args).update(num_machines=2, main_process_ip="host", main_process_port=None)
    _, variables = namespace.prepare_simple_launcher_cmd_env(args)
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("host", "29500")


def several_nodes(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run of DeepSpeed on two nodes."""
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=1\nsecond slots=1\n")
    return {
        "num_machines": 2,
        "deepspeed_multinode_launcher": "pdsh",
        "deepspeed_hostfile": str(hosts),
        "main_process_port": get_free_port(),
    }


def test_the_launcher_of_deepspeed_has_a_command(tmp_path: Path) -> None:
    args = decided(OBSERVED["deepspeed"])
    assert namespace.prepare_deepspeed_cmd_env(args)[0] is None
    vars(args).update(several_nodes(tmp_path))
    command, variables = namespace.prepare_deepspeed_cmd_env(args)
    assert command is not None
    assert " ".join(command[1:]) == (
        f"-m deepspeed.launcher.runner --hostfile {args.deepspeed_hostfile} --launcher pdsh --num_nodes 2 "
        f"--num_gpus 1 --master_port {args.main_process_port} --no_local_rank script.py --x 1"
    )
    assert variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


def test_launchers_with_a_namespace_run_their_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[LaunchPlan] = []

    def record(launcher: Launcher, plan: LaunchPlan) -> int:
        plans.append(plan)
        return 3

    for kind in (LocalLauncher, ElasticLauncher, DeepSpeedLauncher):
        monkeypatch.setattr(kind, "run", record)
    several = decided(OBSERVED["deepspeed"])
    vars(several).update(several_nodes(tmp_path))
    calls = [
        (namespace.simple_launcher, decided(OBSERVED["simple_cpu"])),
        (namespace.multi_gpu_launcher, decided(OBSERVED["multi_gpu"])),
        (namespace.deepspeed_launcher, decided(OBSERVED["deepspeed"])),
        (namespace.deepspeed_launcher, several),
    ]
    for launcher, args in calls:
        with pytest.raises(SystemExit) as caught:
            launcher(args)
        assert caught.value.code == 3
    assert [plan.launcher for plan in plans] == ["local", "elastic", "elastic", "deepspeed"]
    assert [plan.processes for plan in plans] == [1, 2, 2, 2]
    assert all(plan.environment["ACCELERATE_USE_DEEPSPEED"] == "true" for plan in plans[2:])


def test_fp8_and_mesh_extend_a_given_environment() -> None:
    environment = {"A": "1"}
    assert namespace.setup_fp8_env(decided(OBSERVED["multi_gpu"]), environment) is environment
    assert environment == {"A": "1"}
    namespace.setup_fp8_env(decided(OBSERVED["fp8_te"]), environment)
    assert environment["ACCELERATE_FP8_BACKEND"] == "te"
    namespace.prepare_extend_env_parallelism_config(decided(OBSERVED["parallelism_config"]), environment)
    assert environment["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"


def test_filter_keeps_arguments_of_the_other_parser() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="other")
    parser.add_argument("--own", default="kept")
    parser.add_argument("script")
    filtered = namespace._filter_args(argparse.Namespace(role="mine", unknown=1), parser, ["a.py"])
    assert vars(filtered) == {"role": "mine", "own": "kept", "script": "a.py"}
