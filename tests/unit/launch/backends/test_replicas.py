"""Replica groups of one machine have different devices."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.devices import CPU, CUDA
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan
from accelerate.launch.backends.replicas import Groups
from accelerate.settings import FLAG, Layer, merge_layers

pytest.importorskip("torchft")


def plan(devices: int, **flags: Any) -> LaunchPlan:
    machine = Machine(
        hardware=CUDA if devices else CPU,
        devices=max(devices, 1),
        port_in_use=lambda port: False,
        free_port=lambda: 31000,
        environ={},
    )
    target = Target("script", "train.py", ("--lr", "1"))
    return resolve_plan(merge_layers(Layer(FLAG, flags)), machine, target)[0]


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, ["0,1", "2,3"]), ({"gpu_ids": "4,5,6,7"}, ["4,5", "6,7"])]
)
def test_each_replica_group_has_its_own_devices(flags: dict[str, Any], expected: list[str]) -> None:
    groups = plan(4, replicas=2, **flags).detail(Groups)
    for index, ids in enumerate(expected):
        words = groups.command(index)
        assert words[words.index("--num_processes") + 1] == "2"
        assert words[words.index("--gpu_ids") + 1] == ids
        assert words[-3:] == ["train.py", "--lr", "1"]


def test_replica_groups_on_the_cpu_have_no_devices() -> None:
    made = plan(0, replicas=2, cpu=True)
    assert made.processes == 2
    assert "--gpu_ids" not in made.detail(Groups).command(1)


def test_a_replica_group_is_not_divided_again() -> None:
    machine = Machine(environ={"ACCELERATE_REPLICA": "1"}, port_in_use=lambda port: False)
    settings = merge_layers(Layer(FLAG, {"replicas": 2, "cpu": True}))
    made, _ = resolve_plan(settings, machine, Target("script", "train.py"))
    assert made.launcher == "local"
