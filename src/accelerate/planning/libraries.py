"""Rules of libraries of models that a trace with fake tensors needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def values_readable() -> Iterator[None]:
    """Lets transformers read the values of fake tensors until the context ends.

    Its models keep an attention mask of a fake tensor even if the mask selects all tokens. In a trace,
    `planning.operators` knows the values of masks.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        yield
        return
    module.is_fake_tensor = lambda value: False
    try:
        yield
    finally:
        module.is_fake_tensor = original


def disable_caches(model: nn.Module) -> None:
    """Disables the key-value caches of models of transformers.

    Blocks that recompute their activations would append to the caches a second time.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
