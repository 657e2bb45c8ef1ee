"""Tests of what DeepSpeed can do on a machine."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accelerate.base import ConfigurationError
from accelerate.strategies.deepspeed import checks

CPU = torch.device("cpu")


@pytest.fixture
def hardware(monkeypatch):
    """What DeepSpeed computes on: a CPU with bfloat16, and no NVMe."""
    found = SimpleNamespace(
        device_name=lambda: "cpu", is_fp16_supported=lambda: False, is_bf16_supported=lambda: True
    )
    package, inner = ModuleType("deepspeed"), ModuleType("deepspeed.accelerator")
    inner.get_accelerator = lambda: found
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", inner)
    monkeypatch.setattr(checks, "supports_nvme", lambda: False)
    return found


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled=True: DeepSpeed does not support this dtype on cpu"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "Install libaio"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param_device='nvme'"),
    ],
)
def test_unsupported_configurations_of_each_plugin_are_refused(hardware, config, said):
    with pytest.raises(ConfigurationError, match=said):
        checks.check_hardware([{}, config], CPU)


def test_other_hardware_than_that_of_the_run_is_refused(hardware):
    with pytest.raises(ConfigurationError, match="DS_ACCELERATOR='cpu'.* computes on cuda"):
        checks.check_hardware([{}], torch.device("cuda"))


def test_ms_amp_is_refused(hardware):
    checks.check_hardware([{"msamp": None}], CPU)
    with pytest.raises(ConfigurationError, match="enable_msamp=True.*no longer maintained"):
        checks.check_hardware([{"msamp": {"enabled": True, "opt_level": "O1"}}], CPU)


@pytest.mark.parametrize(("installed", "compatible", "reaches"), [(1, 0, True), (0, 1, True), (0, 0, False)])
def test_nvme_is_reached_by_an_extension(monkeypatch, installed, compatible, reaches):
    version, builder = ModuleType("deepspeed.git_version_info"), ModuleType("deepspeed.ops.op_builder")
    version.installed_ops = {"async_io": bool(installed)}
    builder.AsyncIOBuilder = lambda: SimpleNamespace(is_compatible=lambda verbose: bool(compatible))
    for module in (ModuleType("deepspeed"), version, ModuleType("deepspeed.ops"), builder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert checks.supports_nvme() is reaches
