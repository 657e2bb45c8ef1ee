"""What users log, brought into the forms that trackers take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from accelerate.devices import of_device

# Their work is done in the order of a stream; on other devices a value is read when it is logged.


@dataclass(frozen=True)
class Snapshot:
    """A copy of a tensor of an accelerator, on that accelerator: taking it waits for nothing.

    Args:
        tensor: The copy.
        wait: Returns once the copy is there.
    """

    tensor: torch.Tensor
    wait: Callable[[], None]

    def read(self) -> torch.Tensor:
        """Return the values, on the CPU."""
        self.wait()
        return self.tensor.cpu()


def take(value: Any) -> Any:
    """Return a copy that later changes of tensors, arrays, lists and dictionaries do not reach.

    Args:
        value: Tensors, arrays, lists, tuples and dictionaries are copied; anything else is kept.
    """
    if isinstance(value, dict):
        return {name: take(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        return _take_tensor(value.detach())
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(take(each) for each in value)
    return value


def read(value: Any) -> Any:
    """Return what `take` copied, with every tensor on the CPU.

    Args:
        value: What `take` returned.
    """
    if isinstance(value, Snapshot):
        return value.read()
    if isinstance(value, dict):
        return {name: read(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(read(each) for each in value)
    return value


def plain(value: Any) -> Any:
    """Return numbers as Python has them, inside of dictionaries too.

    Args:
        value: Tensors and arrays of one element, and numpy's numbers, become numbers; anything else is kept.
    """
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.item() if _elements(value) == 1 else value
    return value.item() if isinstance(value, np.generic) else value


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return values without nested dictionaries: `{"a": {"b": 1}}` becomes `{"a/b": 1}`.

    Args:
        values: By name; numbers are made plain.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{inner}": each for inner, each in flatten(value).items()})
        else:
            flat[name] = plain(value)
    return flat


def _elements(value: Any) -> int:
    return int(value.numel()) if isinstance(value, torch.Tensor) else int(value.size)


def _take_tensor(tensor: torch.Tensor) -> Any:
    if tensor.is_cpu:
        return tensor.clone()
    if not of_device(tensor.device).has_streams:
        return tensor.cpu()
    copy = tensor.clone()
    ready = getattr(torch, tensor.device.type).current_stream(tensor.device).record_event()
    return Snapshot(copy, ready.synchronize)
