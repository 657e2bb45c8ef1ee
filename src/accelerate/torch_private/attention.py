"""Replacement of public functions of torch, and callbacks of the engine of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

arange: Callable[..., Tensor] = torch.arange
"""The function itself, also while it is replaced."""
Compute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]
"""Function of a replaced function, its arguments and its keyword arguments."""


@contextmanager
def function_replaced(name: str, compute: Compute, owner: Any = nn.functional) -> Iterator[None]:
    """Makes a function of torch return what `compute` does, inside the block."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return compute(original, args, kwargs)

    setattr(owner, name, replaced)
    try:
        yield
    finally:
        setattr(owner, name, original)


def attention_replaced(compute: Compute) -> Any:
    """Makes the public attention function return what `compute` does with its arguments, inside the block.

    The first argument of `compute` is the function that it replaces.

    It is entered after `context_parallel`, which replaces that function and shards a mask like a query.
    """
    return function_replaced("scaled_dot_product_attention", compute)


def is_in_backward() -> bool:
    """Returns whether this thread runs a backward pass, as checkpoints of torch find out."""
    return bool(torch._C._current_graph_task_id() != -1)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls a function at the end of the backward pass that is running, as FSDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
