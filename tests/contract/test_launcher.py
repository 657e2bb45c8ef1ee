"""The contract of every launcher: plans are decided once, printed as they are, and picklable."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from accelerate.launch import LaunchPlan, Machine, Target, as_json, as_text, resolve_plan
from accelerate.launch.backends import launcher_for
from accelerate.launch.backends.base import LAUNCHERS
from accelerate.settings import FLAG, Layer, Settings, merge_layers

TARGET = Target("script", "train.py", ("--lr", "0.25"))
SECRET = {"aws_access_key_id": "AKIA-OPEN", "aws_secret_access_key": "HUSH"}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
CASES: dict[str, dict[str, Any]] = {
    "local": {"cpu": True},
    "elastic": {"cpu": True, "num_processes": 2},
    "replicas": {"cpu": True, "replicas": 2},
    "mpi": {"cpu": True, "mpirun_hostfile": "hosts"},
    "slurm": {"cpu": True, "slurm": True},
    "sbatch": {"slurm": True, "submit": True, "num_machines": 2},
    "deepspeed": {
        "use_deepspeed": True,
        "deepspeed_multinode_launcher": "pdsh",
        "deepspeed_hostfile": "hosts",
    },
    "tpu": {"tpu": True},
    "tpu_pod": {"tpu": True, "tpu_use_cluster": True, "tpu_name": "pod"},
    "sagemaker": {
        "compute_environment": "AMAZON_SAGEMAKER",
        "ec2_instance_type": "ml.p3.2xlarge",
        "iam_role_name": "role",
    },
}


def made(name: str) -> tuple[LaunchPlan, Settings]:
    here = Machine(
        environ=ALLOCATION if name == "slurm" else {},
        port_in_use=lambda port: False,
        mpi_version=lambda: "HYDRA build details:",
        read_file=lambda path: "a\nb\n",
    )
    return resolve_plan(merge_layers(Layer(FLAG, {**SECRET, **CASES[name]})), here, TARGET)


def test_each_launcher_has_a_case() -> None:
    assert CASES.keys() == LAUNCHERS.keys()


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_settings_select_each_launcher(name: str) -> None:
    assert made(name)[0].launcher == name


@pytest.mark.parametrize("name", sorted(CASES))
def test_showing_a_plan_starts_nothing_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object, **kwargs: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", start)
    plan, settings = made(name)
    launcher = launcher_for(plan)
    assert launcher.command(plan) == launcher.command(plan)
    assert all(type(word) is str for word in launcher.command(plan))
    as_text(plan, settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_shown_plan_contains_the_script_and_its_arguments(name: str) -> None:
    plan, settings = made(name)
    text, shown = as_text(plan, settings), json.loads(as_json(plan, settings))
    assert shown["command"] == launcher_for(plan).command(plan)
    for part in (text, json.dumps(shown)):
        assert "train.py" in part
        assert "0.25" in part
    assert shown["launcher"] == name


@pytest.mark.parametrize("name", sorted(CASES))
def test_secrets_stay_out_of_everything_that_is_shown(name: str) -> None:
    plan, settings = made(name)
    shown = as_text(plan, settings) + as_json(plan, settings) + repr(plan)
    assert "HUSH" not in shown
    assert "AKIA" not in shown


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_plan_is_decided_once(name: str) -> None:
    plan, _ = made(name)
    assert made(name)[0] == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
