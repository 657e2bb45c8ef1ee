"""Whether units of sharded models exchange their gradients in the next backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from accelerate import torch_private


def _units(model: nn.Module, attribute: str) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, attribute)]


@contextmanager
def exchanging(model: nn.Module) -> Iterator[None]:
    """Let units exchange gradients inside the block although they were told not to; others need no telling.

    Args:
        model: a prepared module; one without units is left as it is.
    """
    wrappers = [
        (module, enabled)
        for module in model.modules()
        if (enabled := torch_private.gradient_sync(module)) is not None
    ]
    in_place = _units(model, "set_requires_gradient_sync")
    for unit, _ in wrappers:
        torch_private.set_gradient_sync(unit, True)
    for unit in in_place:
        unit.set_requires_gradient_sync(True, recurse=False)
    try:
        yield
    finally:
        for unit, kept in wrappers:
            torch_private.set_gradient_sync(unit, kept)
        for unit in in_place:
            unit.set_requires_gradient_sync(False, recurse=False)
