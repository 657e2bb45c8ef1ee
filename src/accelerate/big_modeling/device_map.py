"""Which module of a model goes where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from accelerate.base.errors import ConfigurationError
from accelerate.base.text import listed
from accelerate.weights.modules import all_tensors
from accelerate.weights.placement import place_of


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Refuse a map that leaves parameters or buffers of a model without a device.

    Args:
        model: the module.
        device_map: devices by module, or by tensor.

    Raises:
        ConfigurationError: with the names that are left over.
    """
    left = [name for name in all_tensors(model) if place_of(name, device_map) is None]
    if left:
        raise ConfigurationError(
            f"device_map gives no device to {listed(left)}. Add their modules, or '' for all that is left."
        )
