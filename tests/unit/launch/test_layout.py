"""How many processes run, and with which variables, also in pods of Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.devices import CPU, CUDA, NPU
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan
from accelerate.launch.layout import choose_threads, worker_environment
from accelerate.settings import FLAG, Layer, env, merge_layers


def test_each_process_has_a_thread_where_there_are_more_processes_than_cores() -> None:
    settings = merge_layers(Layer(FLAG, {"num_processes": 4, "num_machines": 1}))
    settings = choose_threads(settings, Machine(cores=2, environ={}), "elastic", ())
    assert settings.values["num_cpu_threads_per_process"] == 1


def test_each_kind_of_hardware_has_its_own_variable_for_visible_devices() -> None:
    settings = merge_layers(Layer(FLAG, {"gpu_ids": "0,2"}))
    assert worker_environment(settings, Machine(NPU, 4), "elastic")["ASCEND_RT_VISIBLE_DEVICES"] == "0,2"


@pytest.mark.parametrize(
    ("fields", "present", "queues"),
    [
        ({"megatron_lm_tp_degree": 2}, {}, "1"),
        ({"megatron_lm_context_parallel_size": 2}, {}, "1"),
        ({"megatron_lm_tp_degree": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, None),
        ({"megatron_lm_tp_degree": 2, "megatron_lm_use_custom_fsdp": True}, {}, None),
        ({"megatron_lm_pp_degree": 2}, {}, None),
    ],
)
def test_megatron_sets_cuda_device_max_connections_where_needed(
    fields: dict[str, Any], present: dict[str, str], queues: str | None
) -> None:
    settings = merge_layers(Layer(FLAG, {"use_megatron_lm": True, **fields}))
    added = worker_environment(settings, Machine(CUDA, 4, environ=present), "elastic")
    assert added.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues


PYTORCH_JOB = {
    # What Kubeflow's operator sets in the second of two pods with nprocPerNode: "3".
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "train-master-0",
    "PET_MASTER_ADDR": "train-master-0",
    "WORLD_SIZE": "6",
    "RANK": "1",
    "PET_NPROC_PER_NODE": "3",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
}
OLD_PYTORCH_JOB = {"MASTER_PORT": "23456", "MASTER_ADDR": "train-master-0", "WORLD_SIZE": "2", "RANK": "1"}
INDEXED_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "3",
    "PET_MASTER_ADDR": "train-0.train",
    "JOB_COMPLETION_INDEX": "1",
}


def plan(environ: dict[str, str], *layers: Layer, devices: int = 0) -> LaunchPlan:
    settings = env.apply_torchrun_variables(merge_layers(env.layer(environ), *layers), environ)
    machine = Machine(CUDA if devices else CPU, devices or 1, port_in_use=lambda port: False, environ=environ)
    return resolve_plan(settings, machine, Target("script", "train.py"))[0]


def flags(**values: Any) -> Layer:
    return Layer(FLAG, values)


def layout(made: LaunchPlan) -> tuple[int, int, int, str, int]:
    return made.processes, made.machines, made.machine, made.address, made.port


@pytest.mark.parametrize(
    ("environ", "devices", "expected"),
    [
        (PYTORCH_JOB, 0, (6, 2, 1, "train-master-0", 23456)),
        (PYTORCH_JOB, 3, (6, 2, 1, "train-master-0", 23456)),
        ({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "auto"}, 4, (8, 2, 1, "train-master-0", 23456)),
        (
            {**PYTORCH_JOB, "PET_MASTER_ADDR": "", "PET_MASTER_PORT": ""},
            0,
            (6, 2, 1, "train-master-0", 23456),
        ),
        (OLD_PYTORCH_JOB, 4, (8, 2, 1, "train-master-0", 23456)),
        ({**OLD_PYTORCH_JOB, "PET_NPROC_PER_NODE": "2"}, 4, (4, 2, 1, "train-master-0", 23456)),
        (INDEXED_JOB, 0, (6, 2, 1, "train-0.train", 29500)),
        ({**INDEXED_JOB, "PET_NODE_RANK": "0"}, 0, (6, 2, 0, "train-0.train", 29500)),
        (
            {"PET_NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5", "JOB_COMPLETION_INDEX": "1"},
            2,
            (4, 2, 1, "a", 5),
        ),
    ],
)
def test_a_launch_in_a_pod_needs_no_flags(
    environ: dict[str, str], devices: int, expected: tuple[int, int, int, str, int]
) -> None:
    assert layout(plan(environ, devices=devices)) == expected


def test_one_process_for_each_pod_keeps_its_variables() -> None:
    made = plan(OLD_PYTORCH_JOB)
    assert (made.launcher, made.processes, made.machines) == ("local", 1, 1)


def test_flags_take_precedence() -> None:
    given = flags(num_machines=3, machine_rank=2, main_process_ip="b", main_process_port=7, num_processes=6)
    for environ in (PYTORCH_JOB, OLD_PYTORCH_JOB, INDEXED_JOB):
        assert layout(plan(environ, given)) == (6, 3, 2, "b", 7)
    alone = plan(OLD_PYTORCH_JOB, flags(num_machines=1), devices=2)
    assert (alone.processes, alone.machines) == (2, 1)


def test_variables_take_precedence_over_a_file() -> None:
    file = Layer(
        "/home/me/config.yaml",
        {"num_machines": 2, "machine_rank": 0, "main_process_ip": "b", "num_processes": 4},
    )
    assert layout(plan(OLD_PYTORCH_JOB, file, devices=2)) == (4, 2, 1, "train-master-0", 23456)
    assert layout(plan({"JOB_COMPLETION_INDEX": "1"}, file)) == (4, 2, 1, "b", 29500)


@pytest.mark.parametrize(
    "environ",
    [
        {**OLD_PYTORCH_JOB, "LOCAL_RANK": "0"},
        {**OLD_PYTORCH_JOB, "MASTER_ADDR": "127.0.0.1"},
        {**OLD_PYTORCH_JOB, "MASTER_ADDR": ""},
        {**OLD_PYTORCH_JOB, "WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        {"JOB_COMPLETION_INDEX": "1"},
    ],
)
def test_variables_of_one_process_or_machine_do_not_set_machines(environ: dict[str, str]) -> None:
    made = plan(environ, devices=2)
    assert (made.processes, made.machines, made.machine) == (2, 1, 0)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**OLD_PYTORCH_JOB, "WORLD_SIZE": "two"}, "^WORLD_SIZE='two'"),
        ({**OLD_PYTORCH_JOB, "WORLD_SIZE": "0"}, "^WORLD_SIZE='0': at least one process is needed"),
        ({**OLD_PYTORCH_JOB, "RANK": "x"}, "^RANK='x'"),
        ({**OLD_PYTORCH_JOB, "RANK": "2"}, "^RANK: machine_rank=2: there are 2 machines"),
        ({**OLD_PYTORCH_JOB, "MASTER_PORT": "70000"}, "^MASTER_PORT='70000'"),
        ({**INDEXED_JOB, "JOB_COMPLETION_INDEX": "2"}, "^JOB_COMPLETION_INDEX: machine_rank=2: there are 2"),
    ],
)
def test_bad_values_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(environ, devices=3)
