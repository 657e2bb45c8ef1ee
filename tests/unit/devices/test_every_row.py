"""The interface of each row of the table, with a torch that records its calls."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.base import DistributedType, RNGType
from accelerate.big_modeling import get_max_memory
from accelerate.devices import BACKENDS, CPU, MPS, XLA, hardware_table
from accelerate.launch import Machine
from accelerate.launch.layout import worker_environment
from accelerate.rng import _state_access, set_seed
from accelerate.settings import FLAG, Layer, merge_layers
from accelerate.state import PartialState, Topology, process_group

pytestmark = pytest.mark.usefixtures("states")
NUMBERED = [backend for backend in BACKENDS if backend not in (CPU, MPS, XLA)]

FACTS = {
    "cuda": ("MULTI_GPU", "nccl", "CUDA_VISIBLE_DEVICES", "cuda"),
    "xpu": ("MULTI_XPU", "xccl", "ZE_AFFINITY_MASK", "xpu"),
    "npu": ("MULTI_NPU", "hccl", "ASCEND_RT_VISIBLE_DEVICES", "npu"),
    "mlu": ("MULTI_MLU", "cncl", "MLU_VISIBLE_DEVICES", "mlu"),
    "sdaa": ("MULTI_SDAA", "tccl", "SDAA_VISIBLE_DEVICES", "sdaa"),
    "musa": ("MULTI_MUSA", "mccl", "MUSA_VISIBLE_DEVICES", "musa"),
    "hpu": ("MULTI_HPU", "hccl", "HABANA_VISIBLE_MODULES", "hpu"),
    "neuron": ("MULTI_NEURON", "neuron", "NEURON_RT_VISIBLE_CORES", "neuron"),
    "mps": ("MULTI_CPU", None, None, None),
    "xla": ("XLA", "xla", None, "xla"),
    "cpu": ("MULTI_CPU", "gloo", None, "torch"),
}
"""Name -> label of several processes, communication, variable of visible devices, generator."""


def test_the_table_has_the_rows_in_this_order() -> None:
    assert [backend.name for backend in BACKENDS] == list(FACTS)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest, fake_torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A row, as the hardware of this machine."""
    fake_torch.answers["device"] = lambda name, index=None: SimpleNamespace(type=name, index=index)
    monkeypatch.setattr(hardware_table, "detect", lambda: request.param)
    return request.param


def test_the_facts(backend: Any) -> None:
    label, comm, variable, generator = FACTS[backend.name]
    assert backend.distributed_type_of(2) == DistributedType(label)
    assert backend.distributed_type_of(1) == ("XLA" if backend == XLA else "NO")
    assert (backend.comm, backend.visible_env) == (comm, variable)
    assert backend.rng_type == (None if generator is None else RNGType(generator))
    assert backend.name == "mps" or f"`{comm}`" in read_table()[backend.name]


def read_table() -> dict[str, str]:
    """The rows of the guide's table, by device type."""
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs" / "reference" / "hardware.md").read_text()
    return {row.split("`")[1]: row for row in re.findall(r"^\| `.*", page, re.MULTILINE)}


def test_the_guide_has_every_row(backend: Any) -> None:
    row = read_table()[backend.name]
    for fact in (backend.extension, backend.visible_env):
        assert fact is None or f"`{fact}`" in row


@pytest.mark.parametrize("backend", NUMBERED, indirect=True, ids=lambda backend: backend.name)
def test_a_process_takes_its_device_and_joins_its_group(
    backend: Any, fake_torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Any] = []

    def open_group(topology: Topology, row: Any, comm: Any, **arguments: Any) -> str:
        joined.append((topology.rank, row, arguments))
        return str(row.comm)

    monkeypatch.setattr(process_group, "open_group", open_group)
    monkeypatch.setattr(
        "accelerate.state.environments.hardware_table.XLA", SimpleNamespace(installed=lambda: False)
    )
    place = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for name, text in {**place, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, text)
    state = PartialState()
    assert (state.device.type, state.device.index) == (backend.name, 3)
    assert (state.backend, state.distributed_type) == (backend.comm, backend.distributed_type)
    assert (f"{backend.module}.set_device", 3) in fake_torch.calls
    ((rank, row, arguments),) = joined
    assert (rank, row) == (7, backend)
    assert arguments == ({"device_id": state.device} if backend.name == "cuda" else {})


def test_chosen_devices_are_set_in_its_variable(backend: Any) -> None:
    settings = merge_layers(Layer(FLAG, {"gpu_ids": "0,2"}))
    environ = worker_environment(settings, Machine(hardware=backend, devices=4), "elastic")
    assert backend.visible_env is None or environ[backend.visible_env] == "0,2"
    named = {row.visible_env for row in BACKENDS if row.visible_env} & set(environ)
    assert named == ({backend.visible_env} if backend.visible_env else set())


def test_memory_is_that_of_its_devices(backend: Any) -> None:
    memory = get_max_memory()
    places = {"mps": ["mps", "cpu"], "cpu": ["cpu"]}.get(backend.name, [0, 1, 2, 3, "cpu"])
    assert [place for place in places if place in memory] == [place for place in places if place != "cpu"] + (
        ["cpu"] if backend.name != "mps" else []
    )
    if backend not in (CPU, MPS):
        assert memory[0] == 10


def test_its_generator_is_seeded_and_synchronized(
    backend: Any, fake_torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # it imports torch's compiler
    set_seed(3)
    if backend in NUMBERED:
        assert (f"{backend.module}.manual_seed_all", 3) in fake_torch.calls
    if backend.rng_type not in (None, RNGType.TORCH):
        access = _state_access(backend.rng_type, None)
        assert access is not None
        read, write = access
        write(read())
        assert any(path.endswith("set_rng_state") for path in fake_torch.paths)
