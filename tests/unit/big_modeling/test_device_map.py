from __future__ import annotations

import pytest
from torch import nn

from accelerate.base.errors import ConfigurationError
from accelerate.big_modeling import check_device_map


def test_every_tensor_needs_a_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    check_device_map(model, {"": "cpu"})
    check_device_map(model, {"0": 0, "1": "disk"})
    check_device_map(model, {"0.weight": 0, "0.bias": "cpu", "1": "disk"})
    with pytest.raises(ConfigurationError, match="no device to 1.weight, 1.bias, 1.running_mean"):
        check_device_map(model, {"0": 0})
