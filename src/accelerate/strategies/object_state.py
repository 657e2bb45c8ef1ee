"""Values of parameters and of objects of a program, before a forward that is computed once more."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from accelerate import rng, torch_private
from accelerate.strategies.module_state import MAX_COPIED
from accelerate.strategies.tolerances import as_real

MAX_OBJECTS = 10_000
"""Number of values that are searched."""
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_LISTS = (list, deque)
_NOT_CAPTURED = sys.stdlib_module_names | {"torch", "accelerate", "transformers"}
"""Packages whose objects are not searched."""


def captured(values: Iterable[object]) -> Callable[[], None]:
    """Returns a function that gives containers, tensors, arrays, generators and objects the values of now.

    Args:
        values: The values, which are searched for others. Of modules, parameters and buffers are included.
    """
    restores: list[Callable[[], object]] = []
    seen: dict[int, object] = {}
    waiting = list(values)
    while waiting and len(seen) < MAX_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
            continue
        seen[id(value)] = value
        restore, inner = _capture(value)
        waiting += inner
        if restore is not None:
            restores.append(restore)

    @torch.no_grad()
    def restore_all() -> None:
        for restore in restores:
            restore()

    return restore_all


def _capture(value: Any) -> tuple[Callable[[], object] | None, list[Any]]:
    """Returns a function that restores one value, and the values that it holds."""
    kind = type(value)
    if isinstance(value, Tensor):
        return _tensor(value), []
    if isinstance(value, nn.Module):
        return None, [*value.parameters(), *value.buffers()]
    if isinstance(value, np.ndarray):
        return (None, []) if value.size > MAX_COPIED else (_array(value), [])
    if kind in rng.GENERATORS:
        return partial(rng.set_state, value, rng.state_of(value)), []
    if kind is tuple:
        return None, list(value)
    if kind in _MAPPINGS:
        return _mapping(value), list(value.values())
    if kind in _LISTS:
        return _content(value, value.extend), list(value)
    if kind is set:
        return _content(value, value.update), []
    is_own = kind is SimpleNamespace or kind.__module__.partition(".")[0] not in _NOT_CAPTURED
    if is_own and isinstance(attributes := getattr(value, "__dict__", None), dict):
        return _mapping(attributes), list(attributes.values())
    return None, []


def _mapping(mapping: Any) -> Callable[[], None]:
    """Returns a function that gives a mapping its items.

    It does not clear the mapping, in which other threads may look up items.
    """
    items = dict(mapping)

    def restore() -> None:
        for key in mapping.keys() - items.keys():
            del mapping[key]
        dict.update(mapping, items)  # a Counter adds in its own method

    return restore


def _content(container: Any, add: Callable[[Any], object]) -> Callable[[], None]:
    """Returns a function that gives a list or a set its items."""
    items = container.copy()

    def restore() -> None:
        container.clear()
        add(items)

    return restore


def _tensor(tensor: Tensor) -> Callable[[], None] | None:
    if tensor.numel() > MAX_COPIED or tensor.is_meta or torch_private.is_fake(tensor):
        return None
    is_counted = not tensor.is_inference()  # tensors of inference mode do not count changes
    values, version = tensor.detach().clone(), torch_private.in_place_version(tensor) if is_counted else 0

    def restore() -> None:
        if not is_counted:
            with torch.inference_mode():
                tensor.copy_(values)
        elif torch_private.in_place_version(tensor) != version:
            tensor.detach().copy_(values)

    return restore


def _array(array: Any) -> Callable[[], None]:
    values = array.copy()

    def restore() -> None:
        if array.flags.writeable:
            array[...] = values

    return restore


class SavedParameter(NamedTuple):
    """Parameter, with its values, or with their sum if it is large."""

    name: str
    parameter: Tensor
    values: Tensor

    @property
    def is_large(self) -> bool:
        """True if only the sum is known."""
        return self.parameter.numel() > MAX_COPIED

    @property
    def has_changed(self) -> bool:
        """True if a forward has changed it, also through `data`, which has no version."""
        return not torch.equal(_values_of(self.parameter).nan_to_num(), self.values.nan_to_num())

    def restore(self) -> None:
        """Gives it the values that it had."""
        as_real(self.parameter.detach()).copy_(self.values)


def saved_parameters(model: nn.Module) -> list[SavedParameter]:
    """Returns the parameters of a model with their values, but for sharded and quantized ones."""
    named = [(name, p) for name, p in model.named_parameters() if type(p) is nn.Parameter]
    return [SavedParameter(name, p, _values_of(p).clone()) for name, p in named if p.element_size() > 1]


def _values_of(parameter: Tensor) -> Tensor:
    values = as_real(parameter.detach())
    return values if values.numel() <= MAX_COPIED else values.sum(dtype=torch.float32).nan_to_num()
