"""Tests of torch's optimizers and the recorded DeepSpeed versions of them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from accelerate.strategies.deepspeed import map_pytorch_optim_to_deepspeed


class FakeOptimizer:
    def __init__(self, groups, **options):
        self.groups, self.options = groups, options


@pytest.fixture(autouse=True)
def deepspeed_optimizers(monkeypatch):
    for place, name in (
        ("adam", "DeepSpeedCPUAdam"),
        ("adagrad", "DeepSpeedCPUAdagrad"),
        ("lion", "DeepSpeedCPULion"),
    ):
        module = ModuleType(f"deepspeed.ops.{place}")
        setattr(module, name, type(name, (FakeOptimizer,), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def parameters():
    return [torch.nn.Parameter(torch.ones(1))]


class Lion(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "name", "more"),
    [
        (torch.optim.AdamW(parameters(), lr=0.5), "DeepSpeedCPUAdam", {"adamw_mode": True}),
        (torch.optim.Adam(parameters(), lr=0.5), "DeepSpeedCPUAdam", {"adamw_mode": False}),
        (torch.optim.Adagrad(parameters(), lr=0.5), "DeepSpeedCPUAdagrad", {}),
        (Lion(parameters(), lr=0.5), "DeepSpeedCPULion", {}),
    ],
)
def test_deepspeed_versions_keep_groups_and_options(optimizer, name, more):
    mapped = map_pytorch_optim_to_deepspeed(optimizer)
    assert type(mapped).__name__ == name
    assert mapped.groups[0] is optimizer.param_groups[0]
    assert mapped.options["lr"] == 0.5
    assert more.items() <= mapped.options.items()


def test_amsgrad_is_kept():
    mapped = map_pytorch_optim_to_deepspeed(torch.optim.AdamW(parameters(), amsgrad=True))
    assert mapped.options["amsgrad"] is True


def test_other_optimizers_are_unchanged():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    assert map_pytorch_optim_to_deepspeed(optimizer) is optimizer
    own = type("DeepSpeedCPUAdam", (), {"__module__": "deepspeed.ops.adam.cpu_adam"})()
    assert map_pytorch_optim_to_deepspeed(own) is own
