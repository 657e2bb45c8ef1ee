from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

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
def test_an_unavailable_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="accelerators"), init_on_device(0):
        pass


class Pair(nn.Module):
    """Two layers without weights, to which the cases assign a parameter in different ways."""

    def __init__(self, assign: Callable[[Any], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        assign(self)


def test_parameters_that_are_registered_twice_stay_tied() -> None:
    outside = nn.Parameter(torch.ones(2, 2))
    layer = nn.Linear(2, 2, bias=False)

    def share(pair: Any, parameter: nn.Parameter) -> None:
        pair.first.weight = parameter
        pair.second.weight = pair.first.weight
        pair.second.weight = parameter

    def register_layer_first(pair: Any) -> None:
        pair.first = layer
        pair.second.weight = layer.weight

    def register_layer_last(pair: Any) -> None:
        pair.second.weight = layer.weight
        pair.first = layer

    cases: dict[str, tuple[Callable[[Any], object], str]] = {
        "from outside": (lambda pair: share(pair, outside), "meta"),
        "created inside": (lambda pair: share(pair, nn.Parameter(torch.ones(2, 2))), "meta"),
        "of a module from outside": (register_layer_first, "cpu"),
        "of a module from outside, registered last": (register_layer_last, "cpu"),
        "not shared": (lambda pair: None, "meta"),
    }
    wrong = {}
    for name, (case, device) in cases.items():
        with init_empty_weights():
            pair = Pair(case)
        is_tied = pair.first.weight is pair.second.weight
        if is_tied == (name == "not shared") or pair.second.weight.device.type != device:
            wrong[name] = (is_tied, pair.second.weight.device)
    assert not wrong
    assert (outside.device.type, layer.weight.device.type) == ("cpu", "cpu")
