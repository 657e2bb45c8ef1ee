from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from accelerate import init_empty_weights, init_on_device
from accelerate.base import ConfigurationError


class Special(nn.Parameter):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        special = Special(torch.ones(2))
        special.note = 7
        self.special = special


def test_empty_parameters_keep_their_class_without_memory() -> None:
    with init_empty_weights():
        net = Net()
        other = torch.zeros(2)
    assert {parameter.device.type for parameter in net.parameters()} == {"meta"}
    assert net.head.weight is net.body.weight
    assert not net.fixed.requires_grad
    assert isinstance(net.special, Special)
    assert net.special.note == 7
    assert net.norm.running_mean.device.type == other.device.type == "cpu"


def test_init_empty_weights_has_no_effect_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        _ = 1 / 0
    assert nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize("say", ["argument", "variable"])
def test_buffers_too(say: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if say == "variable":
        monkeypatch.setitem(os.environ, "ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_on_device("meta", True if say == "argument" else None):
        net = Net()
        assert torch.zeros(2).device.type == "meta"
    assert net.norm.running_mean.device.type == "meta"


def test_one_inside_the_other() -> None:
    with init_empty_weights():
        with init_on_device("meta"):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert inner.weight.device.type == outer.weight.device.type == "meta"


@pytest.mark.cpu_only
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="accelerators"), init_on_device(0):
        pass
