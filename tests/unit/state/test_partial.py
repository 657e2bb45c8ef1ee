"""PartialState on one process, and the choice of device on machines we do not have."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError, DistributedType
from accelerate.devices import DeviceBackend, hardware_table
from accelerate.state import PartialState, Topology, partial, wait_for_everyone

pytestmark = pytest.mark.usefixtures("states")

KEYS = {
    "_cpu",
    "backend",
    "device",
    "debug",
    "distributed_type",
    "num_processes",
    "process_index",
    "local_process_index",
    "fork_launched",
}


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with four CUDA devices, of which only the choice is looked at."""
    chosen: list[int] = []

    class Gpus(DeviceBackend):
        def available(self) -> bool:
            return True

        def count(self) -> int:
            return 4

        def set_current(self, index: int) -> None:
            chosen.append(index)

    gpus = Gpus(**{name: getattr(hardware_table.CUDA, name) for name in DeviceBackend.__dataclass_fields__})
    monkeypatch.setattr(hardware_table, "detect", lambda: gpus)
    rows = {"cuda": gpus, "cpu": hardware_table.CPU}
    monkeypatch.setattr(hardware_table, "named", lambda name, asked_by: rows[name])
    return chosen


def test_one_process_on_the_cpu() -> None:
    state = PartialState(cpu=True)
    assert set(PartialState._shared_state) >= KEYS
    assert state.__dict__ is PartialState._shared_state
    assert state.distributed_type == DistributedType.NO
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.device, state.backend) == (torch.device("cpu"), None)
    assert (state.debug, state.fork_launched, state.use_distributed) == (False, False, False)
    assert state.topology == Topology()
    assert state.device_backend == hardware_table.CPU
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert str(state) == repr(state)
    assert repr(state) == (
        "Distributed environment: DistributedType.NO\nNum processes: 1\nProcess index: 0\n"
        "Local process index: 0\nDevice: cpu\n"
    )
    state.distributed_type, state.backend = "MULTI_GPU", "nccl"
    assert repr(state).splitlines()[0] == "Distributed environment: MULTI_GPU  Backend: nccl"
    wait_for_everyone()
    state.destroy_process_group()


def test_reset() -> None:
    state = PartialState(cpu=True)
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    with pytest.raises(AttributeError, match="_reset_state"):
        _ = state.num_processes
    assert PartialState(cpu=True).num_processes == 1


def test_arguments_of_the_process_group_are_accepted() -> None:
    state = PartialState(cpu=True, backend=None, timeout=timedelta(seconds=9), _use_sagemaker_dp=False)
    assert state.backend is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"cup": True}, "Unknown arguments cup"), ({"timeout": 30}, "timeout=30: not a datetime.timedelta")],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        PartialState(cpu=True, **arguments)
    assert PartialState._shared_state == {}, "a failed state must not look like one"


def test_a_sagemaker_job_needs_its_variables() -> None:
    with pytest.raises(ConfigurationError, match="data-parallel job"):
        PartialState(cpu=True, _use_sagemaker_dp=True)


def test_variables_are_read_when_the_state_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    state = PartialState()
    assert (state.debug, state.fork_launched, state._cpu) == (True, True, True)


def test_contradicting_variables_leave_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="RANK=3"):
        PartialState()
    assert PartialState._shared_state == {}


def test_the_current_gpu_of_a_single_process(four_gpus: list[int]) -> None:
    state = PartialState()
    assert (state.device, state.default_device) == (torch.device("cuda"), torch.device("cuda"))
    state.set_device()
    assert four_gpus == [], "a single process computes where the user said"


def test_the_cpu_is_used_on_request(four_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert PartialState(cpu=True).device == torch.device("cpu")
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert PartialState().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "device"),
    [("cuda:2", "cuda:2"), ("cuda", "cuda"), ("cpu", "cpu"), ("cpu:0", "cpu:0"), ("cpu:64", "cpu:64")],
)
def test_a_device_by_name(
    four_gpus: list[int], monkeypatch: pytest.MonkeyPatch, name: str, device: str
) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", name)
    state = PartialState()
    assert state.device == torch.device(device)
    assert state.device_backend.name == torch.device(device).type
    assert four_gpus == ([2] if name == "cuda:2" else [])


@pytest.mark.parametrize("name", ["abacus:1", "cuda:first", "cuda:4", "cuda:-1"])
def test_an_unavailable_device_is_refused(
    four_gpus: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name.startswith("abacus"):
        monkeypatch.undo()  # the real table knows the kinds
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", name)
    with pytest.raises(
        ConfigurationError,
        match="TORCH_DEVICE='abacus': no such kind" if name[0] == "a" else f"{name}.*sees 4 devices",
    ):
        PartialState()
    assert PartialState._shared_state == {}


@pytest.mark.parametrize("name", ["cpu:128", "cpu:first", "cpu:-1"])
def test_a_cpu_index_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", name)
    with pytest.raises(ConfigurationError, match=f"'{name}': torch counts CPUs up to 127"):
        PartialState()


def test_unavailable_hardware_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceBackend, "available", lambda row: False)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    with pytest.raises(ConfigurationError, match="'cuda': this process sees 0 devices"):
        PartialState()


def test_the_argument_overrides_the_variable(
    four_gpus: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    with caplog.at_level(logging.WARNING):
        assert PartialState(cpu=True).device == torch.device("cpu")
    assert "ACCELERATE_TORCH_DEVICE=cuda:1 is not used" in caplog.text


@pytest.mark.parametrize(("local_rank", "device"), [(1, "cuda:1"), (5, "cuda:1")])
def test_each_process_takes_its_own_gpu(four_gpus: list[int], local_rank: int, device: str) -> None:
    topology = Topology(rank=local_rank, size=8, local_rank=local_rank, local_size=8)
    assert partial._device_of_rank(hardware_table.detect(), topology) == torch.device(device)


def test_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(partial, "set_numa_affinity", bound.append)
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    PartialState(cpu=True)
    assert bound == [0]


@pytest.mark.parametrize(
    ("given", "local_size", "threads"), [(None, 2, 4), (None, 16, 1), (None, 1, None), ("3", 2, None)]
)
def test_cpu_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str | None, local_size: int, threads: int | None
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(partial, "_cores", lambda: 8)
    environ = {} if given is None else {"OMP_NUM_THREADS": given}
    topology = Topology(size=local_size, local_size=local_size)
    partial._prepare_process(hardware_table.CPU, torch.device("cpu"), topology, environ)
    assert chosen == ([] if threads is None else [threads])
