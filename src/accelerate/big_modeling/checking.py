"""Refuse a device map that does not fit a model or this machine, before anything is moved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from accelerate.base import ConfigurationError, listed, wrong_value
from accelerate.big_modeling.budget import LAST
from accelerate.weights import all_tensors, check_here, find_tied_parameters, mapped_device, resolve_device


def check_devices(device_map: Mapping[str, Any]) -> None:
    """Refuse devices that this machine does not have, before anything is moved.

    Args:
        device_map: devices by module, or by tensor.

    Raises:
        ConfigurationError: it is no map, or names something that is no device, or one that is not here.
    """
    if not isinstance(device_map, Mapping):
        raise wrong_value(
            "device_map",
            device_map,
            "devices by module are needed",
            "pass a dict, such as {'': 'cpu'}; infer_auto_device_map() plans one",
            TypeError,
            AttributeError,
        )
    for device in set(device_map.values()) - {"disk", None}:
        check_here(resolve_device(device))


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Refuse a map that does not fit a model, before anything is moved; warn of names that the model lacks.

    Args:
        model: the module.
        device_map: devices by module, or by tensor.

    Raises:
        ConfigurationError: with the parameters and buffers that have no device, and the tied parameters that
            are apart.
    """
    tensors = all_tensors(model)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [name for name in device_map if name not in modules and name not in tensors]
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}. "
            "They have no effect.",
            stacklevel=2,
        )
    left = [name for name in tensors if mapped_device(name, device_map) is None]
    apart = _find_apart(model, device_map)
    reasons = {
        f"it gives no device to {listed(left)}: add their modules, or '' for all that is left": left,
        f"it parts tied parameters, which are one: {listed(apart)}; give them one device": apart,
    }
    problems = [text for text, names in reasons.items() if names]
    if problems:
        kind = type(model).__name__
        raise ConfigurationError(f"device_map does not fit this {kind}: {'; '.join(problems)}.")


def _find_apart(model: nn.Module, device_map: Mapping[str, Any]) -> list[str]:
    reasons = []
    for group in find_tied_parameters(model):
        devices = {name: mapped_device(name, device_map) for name in group}
        if len({device_key(device) for device in devices.values() if device is not None}) > 1:
            reasons.append(" and ".join(f"{name} ({device})" for name, device in devices.items()))
    return reasons


def device_key(device: Any) -> str:
    """Return the same text for all ways to write a device: 0, "cuda:0" and `torch.device("cuda", 0)` are "0".

    Args:
        device: an entry of a device map.
    """
    kind, _, index = str(device).partition(":")
    return kind if kind in (*LAST, "meta") or kind.isdigit() else index or "0"
