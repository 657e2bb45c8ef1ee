"""A device that no row of the table names is used through torch's generic interface."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.simulated_device import sim

from accelerate import Accelerator, PartialState
from accelerate.base import ConfigurationError
from accelerate.devices import hardware_table, of_device
from accelerate.utils import DistributedType


def test_it_is_found() -> None:
    hardware_table.detect.cache_clear()
    backend = hardware_table.detect()
    assert (backend.name, backend.comm, backend.count()) == ("sim", "simccl", sim.device_count())
    assert hardware_table.named("sim") is of_device(torch.device("sim:1")) is backend
    assert hardware_table.get_current_device_type() == ("sim", "MULTI_GPU")
    assert of_device(torch.device("meta")).name == ""
    with pytest.raises(ConfigurationError, match="no such kind of device"):
        hardware_table.named("sun")


def test_the_launcher_counts_its_devices() -> None:
    backend, count = hardware_table.count_visible({})
    assert (backend.name, count) == ("sim", sim.device_count())


@pytest.mark.usefixtures("states")
def test_an_accelerator_takes_it() -> None:
    accelerator = Accelerator()
    assert accelerator.device.type == "sim"
    assert accelerator.distributed_type == DistributedType.NO
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.usefixtures("states")
def test_the_cpu_is_used_if_it_is_set() -> None:
    assert PartialState(cpu=True).device == torch.device("cpu")


@pytest.mark.usefixtures("states")
def test_one_of_its_devices_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "sim:1")
    assert PartialState().device == torch.device("sim:1")
    assert torch.accelerator.current_device_index() == 1


def test_accelerate_env_names_it() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "env"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "sim" in shown
