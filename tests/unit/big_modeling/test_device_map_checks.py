"""Device maps that cannot work are refused with all that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.stand_ins.models import TiedLayers
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.big_modeling import check_device_map, check_devices, device_key


def test_every_tensor_needs_a_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    check_device_map(model, {"": "cpu"})
    check_device_map(model, {"0": 0, "1": "disk"})
    check_device_map(model, {"0.weight": 0, "0.bias": "cpu", "1": "disk"})
    with pytest.raises(ConfigurationError, match="no device to 1.weight, 1.bias, 1.running_mean"):
        check_device_map(model, {"0": 0})


def test_one_error_names_all_that_is_wrong() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_device_map(TiedLayers(), {"embed": 0, "head": "cpu"})
    text = str(caught.value)
    assert "no device to layers.0.weight" in text
    assert "embed.weight (0) and head.weight (cpu)" in text


def test_an_unknown_name_gives_a_warning() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['2', '0.wait'\]"):
        check_device_map(model, {"": "cpu", "2": "cpu", "0.wait": "cpu"})


def test_one_device_in_two_spellings() -> None:
    check_device_map(TiedLayers(), {"": 0, "head": "cuda:0"})
    check_device_map(TiedLayers(), {"": "cuda", "head": torch.device("cuda", 0)})
    places = [0, "0", "cuda", "cuda:1", "cpu", "mps:0", "meta", torch.device("cpu")]
    assert [device_key(place) for place in places] == ["0", "0", "0", "1", "cpu", "mps", "meta", "cpu"]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        (None, "device_map=None: it must map modules to devices"),
        ("auto", "device_map='auto': it must map modules to devices"),
        ({"": "dsik"}, "device='dsik': torch knows no such device"),
        ({"": 1.5}, "device=1.5: torch knows no such device"),
        ({"": 0}, "there is none here"),
        ({"0": "cpu", "1": "xpu:3"}, "device='xpu:3': this machine has 0 of that kind"),
    ],
)
def test_unavailable_devices_are_refused(device_map: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_devices(device_map)


def test_available_devices_are_accepted() -> None:
    check_devices({"a": "cpu", "b": "disk", "c": torch.device("cpu"), "d": "meta", "e": None})
