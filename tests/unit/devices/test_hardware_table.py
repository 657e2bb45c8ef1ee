"""The one table of backends and look-up in it."""

import platform
import subprocess
import sys

import pytest
from packaging.version import Version

from accelerate.base import ConfigurationError
from accelerate.devices import BACKENDS, CPU, CUDA, MPS, XLA, hardware_table, nvidia


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be on another machine, with another build of torch."""

    def pretend(system="Linux", processor="x86_64", torch="2.13.0", gpus=None):
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(hardware_table, "installed_version", lambda name: Version(torch))
        monkeypatch.setattr(nvidia, "driver_present", lambda: gpus is not None)
        rows = tuple((str(index), f"GPU-{index}") for index in range(gpus or 0))
        monkeypatch.setattr(nvidia, "query", lambda *fields: rows)

    return pretend


def test_names_select_rows_of_the_hardware_table():
    for backend in BACKENDS:
        assert hardware_table.named(backend.name) is backend
    with pytest.raises(ConfigurationError, match=r"device='tpu'.*cuda, xpu"):
        hardware_table.named("tpu")


def test_each_row_is_found_when_those_before_it_are_missing(monkeypatch):
    missing = set()
    for cls in {type(backend) for backend in BACKENDS}:
        monkeypatch.setattr(cls, "available", lambda self: self.name not in missing)
    for backend in BACKENDS:
        hardware_table.detect.cache_clear()
        assert hardware_table.detect() is backend
        assert hardware_table.get_current_device_type() == (backend.name, backend.distributed_type.value)
        missing.add(backend.name)
    hardware_table.detect.cache_clear()


@pytest.mark.parametrize(
    ("facts", "environ", "found"),
    [
        ({}, {}, (CPU, 1)),
        ({"torch": "2.13.0+cpu", "gpus": 4}, {}, (CPU, 1)),
        ({"gpus": 4}, {}, (CUDA, 4)),
        ({"torch": "2.13.0+cu130", "gpus": 4}, {"CUDA_VISIBLE_DEVICES": "1,2"}, (CUDA, 2)),
        ({"gpus": 4}, {"CUDA_VISIBLE_DEVICES": ""}, (CPU, 1)),
        ({"system": "Darwin", "processor": "arm64"}, {}, (MPS, 1)),
        ({"system": "Darwin"}, {}, (CPU, 1)),
    ],
)
def test_counting_without_torch(facts, environ, found, machine):
    machine(**facts)
    assert hardware_table.count_visible(environ) == found


def test_other_builds_are_asked_through_torch(machine, fake_torch):
    machine(torch="2.13.0+rocm6.4")
    assert hardware_table.count_visible({}) == (CUDA, 4)


def test_tpu_chips_are_counted_without_their_runtime(machine, fake_torch, monkeypatch):
    machine()
    monkeypatch.setattr(hardware_table, "detect", lambda: XLA)
    monkeypatch.setattr(hardware_table, "count_chips", lambda: 4)
    assert hardware_table.count_visible({}) == (XLA, 4)
    assert fake_torch.calls == []


def test_counting_imports_no_torch():
    code = (
        "import sys; from accelerate.devices.hardware_table import count_visible; "
        "count_visible(); print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
