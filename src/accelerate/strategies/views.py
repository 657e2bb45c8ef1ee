"""Outputs of modules that are not views, so that a script may change them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private


class _Identity(torch.autograd.Function):
    """Identity whose output may change in place."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


def identical(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same memory that is neither a view nor a leaf of the graph of autograd."""
    identity: Callable[[Tensor], Tensor] = _Identity.apply
    return identity(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def without_views(values: object) -> Any:
    """Returns nested values with tensors that are not views."""
    return torch_private.pytree.tree_map_only(
        Tensor, lambda tensor: identical(tensor) if torch_private.is_view(tensor) else tensor, values
    )


def return_no_views(unit: nn.Module) -> None:
    """Lets a unit that FSDP will shard return tensors that a script may change in place.

    FSDP begins the backward pass of a unit in hooks of its outputs. A change of a view in place removes them.
    """
    # The hook runs before those of FSDP, which are not compiled either.
    unit.register_forward_hook(torch.compiler.disable(_replace_views))  # type: ignore[no-untyped-call]


def shard_unit(unit: nn.Module, **options: Any) -> None:
    """Calls `fully_shard` for a module whose outputs may be changed in place."""
    from torch.distributed.fsdp import fully_shard

    return_no_views(unit)
    fully_shard(unit, **options)
    unit.register_forward_pre_hook(_gather_outside_inference, prepend=True)


def _gather_outside_inference(unit: Any, args: object) -> None:
    """Lets the first forward of a unit allocate tensors that can be trained, also in inference mode."""
    if torch.is_inference_mode_enabled() and not torch_private.has_gathered(unit):
        with torch.inference_mode(mode=False):
            unit.unshard()


def _replace_views(module: nn.Module, args: tuple[Any, ...], outputs: object) -> Any:
    return without_views(outputs)
