"""Whole parameters of models that DeepSpeed has cut into shards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from accelerate.base import is_deepspeed_available


def GatheredParameters(
    params: Iterable[nn.Parameter] | nn.Parameter,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[Any]:
    """Return a context in which parameters that ZeRO stage 3 has sharded are whole; called on all ranks.

    Without DeepSpeed parameters are whole anyway, and the context does nothing.

    Args:
        params: the parameters.
        modifier_rank: the rank whose changes are kept and sent to the others; None: changes are lost.
        fwd_module: the module whose forward uses them from elsewhere.
        enabled: whether it does anything.

    Source: https://deepspeed.readthedocs.io/en/latest/zero3.html
    """
    if not is_deepspeed_available():
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )
    return gathered
