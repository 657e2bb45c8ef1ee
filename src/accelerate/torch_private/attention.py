"""Replacement of the public attention function for context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def attention_replaced(compute: Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]) -> Iterator[None]:
    """Makes the public attention function return what `compute` does with its arguments, inside the block.

    The first argument of `compute` is the function that it replaces.

    It is entered after `context_parallel`, which replaces that function and shards a mask like a query.
    """
    attend = nn.functional.scaled_dot_product_attention

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return compute(attend, args, kwargs)

    nn.functional.scaled_dot_product_attention = replaced
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = attend
