"""Which parameters a loss depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Iterate over the leaves of a loss's graph, those near the loss first; mostly the first one is enough.

    Args:
        loss: with a graph.
    """
    if loss.grad_fn is None:
        yield loss
        return
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions if following is not None]
