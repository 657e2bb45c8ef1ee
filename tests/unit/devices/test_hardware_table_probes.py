"""Public probes over the table of hardware."""

import sys

import pytest

from accelerate.base import ConfigurationError
from accelerate.devices import BACKENDS, CPU, CUDA, HPU, XLA, hardware_table

BY_NAME = {
    **{
        backend.name: getattr(hardware_table, f"is_{backend.name}_available")
        for backend in BACKENDS
        if backend not in (XLA, CPU)
    },
    "xla": hardware_table.is_torch_xla_available,
}
"""Every accelerator has a probe."""


@pytest.fixture(autouse=True)
def forget():
    """Clear cached probes for every test."""
    kept = [probe for probe in vars(hardware_table).values() if hasattr(probe, "cache_clear")]
    for probe in kept:
        probe.cache_clear()
    yield
    for probe in kept:
        probe.cache_clear()


@pytest.mark.parametrize("name", BY_NAME)
def test_probes_call_their_backend(name, fake_torch):
    assert BY_NAME[name]() is True


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"cuda", "mps", "xla", "hpu"}))
def test_check_device_looks_for_one(name, fake_torch):
    fake_torch.answers["device_count"] = 0
    assert BY_NAME[name]() is True
    assert BY_NAME[name](check_device=True) is False


def test_probes_find_no_accelerator_on_a_cpu_machine(monkeypatch):
    monkeypatch.setattr(hardware_table, "detect", lambda: CPU)
    for name in set(BY_NAME) - {"cuda", "xpu", "mps"}:
        assert BY_NAME[name]() is False
    assert hardware_table.is_habana_gaudi1() is False
    assert hardware_table.is_fp8_available() in (True, False)
    assert hardware_table.is_torch_distributed_available() is True


def test_xla_can_be_turned_off_and_asked_what_it_drives(fake_torch, monkeypatch):
    assert hardware_table.USE_TORCH_XLA is True
    assert hardware_table.is_torch_xla_available(check_is_tpu=True)
    assert not hardware_table.is_torch_xla_available(check_is_gpu=True)
    with pytest.raises(ConfigurationError, match="check_is_tpu is true too"):
        hardware_table.is_torch_xla_available(True, True)
    hardware_table.is_torch_xla_available.cache_clear()
    monkeypatch.setenv("USE_TORCH_XLA", "false")
    assert hardware_table.USE_TORCH_XLA is False
    assert not hardware_table.is_torch_xla_available()


def test_bf16_and_tpus(fake_torch, monkeypatch):
    monkeypatch.setattr(hardware_table, "detect", lambda: XLA)
    assert hardware_table.is_bf16_available()
    assert not hardware_table.is_bf16_available(ignore_tpu=True)


def test_low_precision_on_the_processor(monkeypatch):
    monkeypatch.setattr(hardware_table, "detect", lambda: CPU)
    assert hardware_table.is_bf16_available()
    assert hardware_table.is_fp16_available()


def test_first_gaudi_has_no_fp16(fake_torch, monkeypatch):
    monkeypatch.setattr(hardware_table, "detect", lambda: HPU)
    fake_torch.answers["get_device_name"] = "GAUDI2"
    assert hardware_table.is_fp16_available()
    hardware_table.is_habana_gaudi1.cache_clear()
    fake_torch.answers["get_device_name"] = "GAUDI"
    assert hardware_table.is_habana_gaudi1()
    assert not hardware_table.is_fp16_available()


def test_amd_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(type(CUDA), "available", lambda self: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert not hardware_table.is_rocm_available()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert hardware_table.is_rocm_available()


def test_old_torch_has_no_mps(fake_torch):
    assert hardware_table.is_mps_available("1.12")
    assert not hardware_table.is_mps_available("99.0")


def test_libraries_for_fp8(monkeypatch):
    assert hardware_table.is_transformer_engine_mxfp8_available() is False
    monkeypatch.setattr(hardware_table, "is_transformer_engine_available", lambda: False)
    monkeypatch.setattr(hardware_table, "is_msamp_available", lambda: False)
    monkeypatch.setattr(hardware_table, "is_torchao_available", lambda: True)
    assert hardware_table.is_fp8_available()
    monkeypatch.setattr(hardware_table, "is_torchao_available", lambda: False)
    assert not hardware_table.is_fp8_available()


def test_gaudi_process_group_is_imported_on_request(fake_torch, monkeypatch):
    with pytest.raises(ImportError, match="habana_frameworks"):
        hardware_table.is_hpu_available(init_hccl=True)
    name = "habana_frameworks.torch.distributed"
    monkeypatch.setitem(sys.modules, name, fake_torch.module(name))
    monkeypatch.setitem(sys.modules, f"{name}.hccl", fake_torch.module(f"{name}.hccl"))
    assert hardware_table.is_hpu_available(init_hccl=True)


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="USE_NOTHING"):
        hardware_table.USE_NOTHING  # noqa: B018
