from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accelerate.base import ConfigurationError, MissingPackageError, current
from accelerate.commands import namespace
from accelerate.commands.launch import launch_command_parser
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan
from accelerate.launch.backends import launcher_for, precision_variables
from accelerate.launch.backends.tpu import TpuDetails
from accelerate.settings import FLAG, Layer, merge_layers

SCRIPT = """
import os, sys
seen = []
def main():
    seen.append((sys.argv[1:], os.environ["FORK_LAUNCHED"], os.environ.get("XLA_USE_BF16")))
"""
Spawned = list[tuple[tuple[Any, ...], int | None]]


def made(
    name: str = "train.py", *, kind: Any = "script", modules: tuple[str, ...] = (), **flags: Any
) -> LaunchPlan:
    machine = Machine(environ={}, has_module=lambda module: module in modules)
    target = Target(kind, name, ("--lr", "1"))
    return resolve_plan(merge_layers(Layer(FLAG, {"tpu": True, **flags})), machine, target)[0]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Spawned:
    """torch_xla, as far as a launch sees it: it calls the function once, in this process."""
    calls: Spawned = []

    def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int | None) -> None:
        calls.append((args, nprocs))
        function(0, *args)

    module: Any = ModuleType("torch_xla.distributed")
    module.xla_multiprocessing = ModuleType("torch_xla.distributed.xla_multiprocessing")
    module.xla_multiprocessing.spawn = spawn
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.distributed", module)
    return calls


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script under a name of its own; what importing it leaves behind is undone."""
    name = f"sample_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("FORK_LAUNCHED", "0")
    return str(tmp_path / f"{name}.py")


def seen_by(script: str) -> Any:
    return sys.modules.pop(Path(script).stem).seen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "processes"), [({}, None), ({"num_processes": 1}, 1), ({"num_processes": 8}, None)]
)
def test_the_function_runs_in_each_process(
    spawned: Spawned, script: str, given: dict[str, int], processes: int | None
) -> None:
    argv = list(sys.argv)
    plan = made(script, mixed_precision="bf16", **given)
    assert launcher_for(plan).run(plan) == 0
    assert spawned == [((), processes)]
    assert seen_by(script) == [(["--lr", "1"], "1", "1")]
    assert sys.argv == argv
    assert "XLA_USE_BF16" not in current()


def test_another_function_can_be_named(spawned: Spawned, script: str) -> None:
    plan = made(script, main_training_function="train")
    with pytest.raises(ConfigurationError, match="--main_training_function='train': the script has no such"):
        launcher_for(plan).run(plan)
    assert seen_by(script) == []


def test_a_missing_module_and_a_missing_package_are_named(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = made("nowhere_at_all", kind="module")
    with pytest.raises(ConfigurationError, match="There is no Python module 'nowhere_at_all'"):
        launcher_for(plan).run(plan)
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    monkeypatch.setitem(sys.modules, "torch_xla.distributed", None)
    with pytest.raises(MissingPackageError, match="--tpu needs torch_xla"):
        launcher_for(plan).run(plan)


def test_a_program_has_no_function() -> None:
    with pytest.raises(ConfigurationError, match="on TPU each process calls a function of the script"):
        made("a", kind="program")


def test_number_formats_have_their_variables() -> None:
    def variables(downcast: bool, precision: str) -> dict[str, str]:
        return precision_variables(
            merge_layers(Layer(FLAG, {"downcast_bf16": downcast, "mixed_precision": precision}))
        )

    assert variables(False, "bf16") == {"XLA_USE_BF16": "1"}
    assert variables(True, "bf16") == {"XLA_DOWNCAST_BF16": "1"}
    assert variables(True, "no") == {}
    assert made(mixed_precision="bf16", downcast_bf16=True).detail(TpuDetails).variables == {
        "XLA_DOWNCAST_BF16": "1"
    }


POD = {"tpu_use_cluster": True, "tpu_name": "pod", "env": ("A=1", "B=x y")}
INNER = "accelerate-launch --quiet --tpu --no_tpu_cluster train.py --lr 1"


def test_a_pod_is_reached_by_gcloud() -> None:
    plan = made(tpu_zone="us-1", tpu_use_sudo=True, mixed_precision="bf16", **POD)
    words = launcher_for(plan).command(plan)
    head = "gcloud compute tpus tpu-vm ssh pod --zone us-1 --worker all --command"
    assert " ".join(words[:-1]) == head
    parts = words[-1].split(" && ")
    assert {"export A=1", "export B='x y'", "export ACCELERATE_MIXED_PRECISION=bf16"} <= set(parts)
    assert parts[-2] == f"cd {Path.cwd()}"
    assert parts[-1] == "sudo -E " + INNER.replace("--quiet", "--quiet --mixed_precision=bf16")


def test_a_pod_is_reached_by_torch_xla_where_it_can() -> None:
    plan = made(modules=("torch_xla.distributed.xla_dist",), vm=("one", "two"), **POD)
    words = launcher_for(plan).command(plan)
    assert words[:5] == [sys.executable, "-m", "torch_xla.distributed.xla_dist", "--tpu", "pod"]
    assert words[5:9] == ["--vm", "one", "--vm", "two"]
    start = words.index("--")
    variables = words[9:start]
    assert variables[::2] == ["--env"] * (len(variables) // 2)
    assert {"A=1", "B=x y"} <= set(variables[1::2])
    assert " ".join(words[start + 1 :]) == INNER


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({**POD, "tpu_name": None}, "tpu_name=None: the hosts of a pod are found by its name"),
        ({**POD, "env": ("A",)}, "--env='A': it has no value"),
        ({**POD, "vm": ("one",)}, "--vm='one': choosing hosts needs torch_xla.distributed.xla_dist"),
    ],
)
def test_pods_that_cannot_work_are_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        made(**flags)
    assert problem in str(caught.value)


def test_the_entry_points_with_a_namespace(spawned: Spawned, script: str) -> None:
    args = launch_command_parser().parse_args(
        ["--tpu", "--mixed_precision", "bf16", "--debug", script, "--lr", "1"]
    )
    environment: dict[str, str] = {}
    assert namespace.prepare_tpu(args, environment) == (args, environment)
    assert environment == {"XLA_USE_BF16": "1", "ACCELERATE_DEBUG_MODE": "true"}
    args.env = ["A=1"]
    namespace.prepare_tpu(args, environment, pod=True)
    assert args.env == ["A=1", "XLA_USE_BF16=1", "ACCELERATE_DEBUG_MODE=true"]
    namespace.tpu_launcher(args)
    assert seen_by(script) == [(["--lr", "1"], "1", "1")]


def test_the_pod_launcher_with_a_namespace_needs_a_name() -> None:
    args = launch_command_parser().parse_args(["--tpu", "--tpu_cluster", "train.py"])
    with pytest.raises(ConfigurationError, match="the hosts of a pod are found by its name"):
        namespace.tpu_pod_launcher(args)
