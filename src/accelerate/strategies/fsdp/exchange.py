"""Gradient synchronization of FSDP units, enabled or disabled for a block.

The strategies of FSDP call it in `no_sync`, and `Accelerator.trigger_sync_in_backward` for a whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from accelerate import torch_private


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Enables or disables gradient synchronization of sharded units, as a context manager.

    Afterwards the units of FSDP 1 are as before, and those of FSDP 2 do the opposite.
    """
    modules: list[Any] = list(model.modules())
    wrappers = [(unit, kept) for unit in modules if (kept := torch_private.gradient_sync(unit)) is not None]
    in_place = [unit for unit in modules if hasattr(unit, "set_requires_gradient_sync")]
    for unit, _ in wrappers:
        torch_private.set_gradient_sync(unit, enabled)
    for unit in in_place:
        unit.set_requires_gradient_sync(enabled, recurse=False)
    try:
        yield
    finally:
        for unit, kept in wrappers:
            torch_private.set_gradient_sync(unit, kept)
        for unit in in_place:
            unit.set_requires_gradient_sync(not enabled, recurse=False)
