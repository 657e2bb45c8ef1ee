"""Store weights in one number format, and compute in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.hooks.base import ModelHook, not_traced


class LayerwiseCastingHook(ModelHook):
    """A layer's weights take less memory in between than while it computes.

    Args:
        storage_dtype: of the weights in between.
        compute_dtype: of the weights while the layer computes.
        non_blocking: whether conversions may go on in the background.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)

    @not_traced
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @not_traced
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output
