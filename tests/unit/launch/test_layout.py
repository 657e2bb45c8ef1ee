"""How many processes run, and with which variables."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.devices import CUDA, NPU
from accelerate.launch import Machine
from accelerate.launch.layout import choose_threads, worker_environment
from accelerate.settings import FLAG, Layer, merge_layers


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
