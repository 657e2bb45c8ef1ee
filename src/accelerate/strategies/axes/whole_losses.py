"""Cross entropy over whole sequences, of which each rank has logits and labels for a part.

A mean over the positions of a rank is not a part of the mean over all, because ranks may have different
numbers of labels that count. So the sums of all ranks are divided by the number of labels of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accelerate.base import ConfigurationError
from accelerate.strategies.axes.head_exchange import sum_over
from accelerate.strategies.axes.partial_sums import PartialSums
from accelerate.strategies.axes.sequence_shards import SequenceShards
from accelerate.strategies.axes.sharded_forwards import sequence_state
from accelerate.wrappers import FunctionMode

_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)
LOSSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
"""Functions with these arguments, of which the second one has no label smoothing."""


def cross_entropy(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Returns the cross entropy of the whole sequences of a sharded forward, with gradients for this rank.

    Gradients are averaged over the ranks later, so the gradient of a rank is `ranks` times that of its part.
    """
    state = sequence_state()
    forward = state.current
    if forward is None:
        return function(*args, **kwargs)
    forward.count_layers()
    with state.whole():  # in a mode of torch functions, torch calls the replaced function again
        return whole_loss(function, named_arguments(args, kwargs), forward.shards)


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of `cross_entropy` by name."""
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


def whole_loss(function: Callable[..., Tensor], arguments: dict[str, Any], shards: SequenceShards) -> Tensor:
    """Returns the mean or the sum of a loss over whole sequences.

    Called on all ranks of the group.

    Args:
        function: One of `LOSSES`.
    """
    reduction = arguments.get("reduction", "mean")
    is_old = arguments.get("reduce") is not None or arguments.get("size_average") is not None
    if reduction not in ("mean", "sum") or is_old:
        return function(**arguments)
    own = function(**{**arguments, "reduction": "sum"})
    ranks = len(shards.sizes)
    if reduction == "sum":
        (total,) = sum_over(shards, own)
        return _with_value(own * ranks, total)
    total, weight = sum_over(shards, own, _weight_of(arguments))
    return _with_value(own * (ranks / weight).to(own.dtype), total / weight)


def _with_value(loss: Tensor, value: Tensor) -> Tensor:
    """Returns a value that is equal on all ranks, with the gradient of the loss of this rank."""
    if not loss.requires_grad:
        return value.to(loss.dtype)
    return loss + (value.to(loss.dtype) - loss.detach())


def _weight_of(arguments: Mapping[str, Any]) -> Tensor:
    """Returns the number by which the mean of `cross_entropy` divides the sum."""
    target, weight = arguments["target"], arguments.get("weight")
    if target.is_floating_point():  # probabilities of classes
        return torch.tensor(target.numel() / arguments["input"].shape[1 % target.ndim], device=target.device)
    counts: Tensor = target != arguments.get("ignore_index", -100)
    if weight is None:
        return counts.sum()
    used: Tensor = weight[target.where(counts, torch.zeros_like(target))]
    return used.where(counts, weight.new_zeros(())).sum()


def refuse_whole_labels(arguments: Mapping[str, Any], shards: SequenceShards) -> None:
    """Raises an error for logits of this rank and labels of whole sequences."""
    logits, target = arguments.get("input"), arguments.get("target")
    if not isinstance(logits, Tensor) or not isinstance(target, Tensor) or logits.ndim != 2:
        return
    rows = logits.shape[0]
    if target.ndim == 1 and target.shape[0] != rows and target.shape[0] * shards.own == rows * shards.length:
        raise ConfigurationError(
            f"cross_entropy gets logits of {rows} positions of this rank and {target.shape[0]} labels of "
            "whole sequences. Add the labels to the buffers of accelerator.maybe_context_parallel, or pass "
            "them to the model, which computes the loss."
        )


def block_losses(shards: SequenceShards, sums: PartialSums) -> FunctionMode:
    """Returns a mode in which a mean of `cross_entropy` over positions is that over whole sequences.

    Args:
        sums: Watches other sums over positions.
    """

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in LOSSES and not sequence_state().depth:
            arguments = named_arguments(args, kwargs)
            refuse_whole_labels(arguments, shards)
            if arguments.get("reduction", "mean") == "mean":
                return whole_loss(func, arguments, shards)
        output = func(*args, **kwargs)
        if func is torch.nn.functional.kl_div and kwargs.get("reduction") == "batchmean" and args[0].ndim > 2:
            (total,) = sum_over(shards, output)
            return _with_value(output * len(shards.sizes), total)
        sums.watch(func, args, kwargs, output, shards.own)
        return output

    return FunctionMode(call)
