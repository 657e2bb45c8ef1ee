"""Errors for models, optimizers, batches and losses whose training step cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from accelerate.base import wrong_value
from accelerate.nested import iterate_tensors

UNTRACEABLE_OPTIMIZERS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it computes the loss several times in each step",
    torch.optim.SparseAdam: "it takes sparse gradients",
}
"""Optimizer -> reason why its step cannot be traced."""


def check_step(model: object, optimizers: Sequence[Any], batch: object) -> None:
    """Raises an error for a model, an optimizer or a batch that cannot be traced."""
    if not isinstance(model, nn.Module):
        raise wrong_value("model", model, "it is not a torch.nn.Module", "Pass the model itself")
    _check_modules(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        reason = "it has no parameters that train"
        raise wrong_value("model", type(model).__name__, reason, "Let some require gradients")
    for optimizer in optimizers:
        _check_optimizer(optimizer, model)
    for tensor in iterate_tensors(batch):
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else "sparse"
            reason = f"it has a {kind} tensor, and a plan traces dense tensors"
            raise wrong_value("batch", type(batch).__name__, reason, "Plan with a padded, dense batch")


def _check_modules(model: nn.Module) -> None:
    name = type(model).__name__
    named = model.named_parameters()
    lazy = [name for name, parameter in named if isinstance(parameter, UninitializedParameter)]
    if lazy:
        reason = f"{', '.join(lazy[:3])} of {name} have no shape yet"
        fix = "Call the model with a batch once before it is planned, as before it gets an optimizer"
        raise wrong_value("model", name, reason, fix)
    for path, module in model.named_modules():
        where = f"{path or 'it'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            reason = f"{where} is compiled by torch.jit, and a plan traces Python modules"
            raise wrong_value("model", name, reason, "Plan the module that was compiled")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            reason = f"{where} has sparse gradients, and a plan traces dense gradients"
            raise wrong_value("model", name, reason, "Plan with sparse=False, which needs more memory")


def _check_optimizer(optimizer: object, model: nn.Module) -> None:
    name = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups"):
        reason = "it is not a torch.optim.Optimizer"
        raise wrong_value("optimizer", optimizer, reason, "Pass that of the model, or several as a list")
    for kind, reason in UNTRACEABLE_OPTIMIZERS.items():
        if isinstance(optimizer, kind):
            reason = f"{reason}, and a plan traces one pass with dense gradients"
            fix = "Plan with torch.optim.AdamW, whose state is two values for each parameter"
            raise wrong_value("optimizer", kind.__name__, reason, fix)
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        reason = f"it updates no parameter of {type(model).__name__}"
        raise wrong_value("optimizer", name, reason, "Pass an optimizer of model.parameters()")


def check_loss(loss: object) -> None:
    """Raises an error for a loss without a backward pass."""
    fix = "Return a tensor with one element that depends on the parameters of the model"
    if not isinstance(loss, Tensor):
        raise wrong_value("loss", loss, f"it returned a {type(loss).__name__}", fix)
    if loss.numel() != 1:
        raise wrong_value("loss", tuple(loss.shape), "a loss has one element, and it has this shape", fix)
    if not loss.requires_grad:
        raise wrong_value("loss", loss.dtype, "it returned a tensor of this dtype without gradients", fix)
