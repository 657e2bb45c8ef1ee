"""Binding a process to the cores near its GPU."""

import os

import pytest

from accelerate.base import ConfigurationError
from accelerate.devices import nvidia


@pytest.fixture
def bound(monkeypatch):
    """Note what the process is bound to instead of binding it."""
    cores = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, wanted: cores.append(wanted))
    nvidia.set_numa_affinity.cache_clear()
    yield cores
    nvidia.set_numa_affinity.cache_clear()


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A machine with two GPUs near different cores, the second with nothing known about it."""
    folder = tmp_path / "0001:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-3,8\n")
    rows = {
        "index": ("0", "1"),
        "uuid": ("GPU-0", "GPU-1"),
        "pci.bus_id": ("00000001:3B:00.0", "00000000:5E:00.0"),
    }
    monkeypatch.setattr(nvidia, "query", lambda *fields: tuple(zip(*(rows[f] for f in fields), strict=True)))
    monkeypatch.setattr(nvidia, "driver_present", lambda: True)
    monkeypatch.setattr(nvidia, "PCI_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("text", "cores"), [("", []), ("3", [3]), ("0-2", [0, 1, 2]), ("0-1, 8,10-11\n", [0, 1, 8, 10, 11])]
)
def test_parse_cpu_list(text, cores):
    assert nvidia.parse_cpu_list(text) == cores


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-b", "1 2"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigurationError, match="neither a core nor a range"):
        nvidia.parse_cpu_list(text)


def test_cores_near_the_gpu_of_each_process(two_gpus):
    assert nvidia.near_cores(0, {}) == [0, 1, 2, 3, 8]
    assert nvidia.near_cores(1, {}) == []
    assert nvidia.near_cores(1, {"CUDA_VISIBLE_DEVICES": "1,0"}) == [0, 1, 2, 3, 8]
    assert nvidia.near_cores(0, {"CUDA_VISIBLE_DEVICES": ""}) == []


def test_binding_happens_once_unless_overridden(two_gpus, bound, caplog):
    nvidia.set_numa_affinity(0)
    nvidia.set_numa_affinity(0)
    assert bound == [[0, 1, 2, 3, 8]]
    nvidia.override_numa_affinity(0)
    assert len(bound) == 2
    assert not caplog.records


def test_cores_are_logged_on_request_or_in_debug_mode(two_gpus, bound, caplog, monkeypatch):
    caplog.set_level("INFO")
    nvidia.override_numa_affinity(0, verbose=True)
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    nvidia.override_numa_affinity(0)
    assert [record.args for record in caplog.records] == [(0, [0, 1, 2, 3, 8])] * 2


def test_an_affinity_that_cannot_be_set_gives_a_warning(two_gpus, bound, caplog, monkeypatch):
    nvidia.override_numa_affinity(1)

    def refuse(process, cores):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    nvidia.override_numa_affinity(0)
    monkeypatch.setattr(nvidia, "driver_present", lambda: False)
    nvidia.override_numa_affinity(0)
    monkeypatch.delattr(os, "sched_setaffinity")
    nvidia.override_numa_affinity(0)
    assert len(caplog.records) == 4
    assert all("affinity was asked for" in record.getMessage() for record in caplog.records)
    assert bound == []
