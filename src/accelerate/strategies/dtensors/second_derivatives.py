"""Errors for losses of gradients, which sharded models do not compute."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from accelerate.base import StateError
from accelerate.nested import iterate_tensors

ONE_BACKWARD = (
    "The backward pass needs weights that FSDP has freed after an earlier backward pass of the same forward, "
    "such as that of a gradient penalty (torch.autograd.grad with create_graph=True) or with "
    "retain_graph=True. FSDP computes one backward pass for a forward. Train this model with "
    "DistributedDataParallel, or compute the penalty from forwards only, such as the change of the outputs "
    "for a small change of the inputs."
)
NO_SECOND_DERIVATIVES = (
    "Gradients are computed with create_graph=True, such as for a gradient penalty, and layers that tensor "
    "or expert parallelism shards have no second derivatives. Train without tp_size and ep_size, or compute "
    "the penalty from forwards only, such as the change of the outputs for a small change of the inputs."
)


def refuse_second_derivatives(message: str, module: nn.Module, args: object, outputs: object) -> None:
    """Makes a backward pass with `create_graph=True` from the outputs of a module raise an error.

    Kernels would read weights that FSDP has freed, and DTensors would omit terms of the derivative.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for tensor in iterate_tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(_check_derivative, message))  # type: ignore[no-untyped-call]


def _check_derivative(message: str, gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise StateError(message)
