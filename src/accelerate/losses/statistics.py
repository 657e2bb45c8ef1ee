"""Statistics of the logits of each token, from which losses are computed, without a tensor of all logits.

Slices of the vocabulary are computed one after another, in the forward pass and again in the backward pass.
So gradients of weights are written once, from all tokens, and only one for the hidden states is accumulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate.base import StateError

SLICE_ELEMENTS = 2**24
"""Number of logits in a slice, unless the hidden states have more elements."""


@dataclass(frozen=True)
class Vocabulary:
    """Properties of the logits that are computed from matrix products, and their shard on this rank.

    Attributes:
        dtypes: Dtype in which each matrix product is computed.
        accumulation: Dtype of the logits and of sums over them.
        scale: Factor of the logits.
        soft_cap: Bound c of the logits, which become c * tanh(logits / c), or None.
        slice_size: Number of entries whose logits exist at a time.
        first: Index of the first entry on this rank.
        group: Process group over which the entries are sharded, or None.
        sums_logits: Whether the sum of the logits is computed.
    """

    dtypes: tuple[torch.dtype, ...]
    accumulation: torch.dtype
    scale: float = 1.0
    soft_cap: float | None = None
    slice_size: int = SLICE_ELEMENTS
    first: int = 0
    group: Any = None
    sums_logits: bool = False


class Statistics(NamedTuple):
    """Statistics of the logits of N tokens, each of shape (N,).

    Attributes:
        target: Logit of the label, or 0 if no entry of the vocabulary has its index.
        log_sum_exp: Logarithm of the sum of the exponentials of the logits.
        total: Sum of the logits, or 0 if it is not computed.
    """

    target: Tensor
    log_sum_exp: Tensor
    total: Tensor


def slice_size_of(num_tokens: int, hidden_size: int) -> int:
    """Returns the number of entries whose logits are about as large as the hidden states."""
    return max(hidden_size, SLICE_ELEMENTS // max(1, num_tokens), 1)


def compute_statistics(
    labels: Tensor,
    products: Sequence[tuple[Tensor, Tensor]],
    bias: Tensor | None,
    vocabulary: Vocabulary,
) -> Statistics:
    """Returns the statistics of the logits of each token, with gradients.

    The logits are the sum of the matrix products `inputs @ weight.T`, and the bias.

    Args:
        labels: Integers of shape (N,), counted in the whole vocabulary.
        products: Inputs of shape (N, features), and weights of shape (entries on this rank, features).
        bias: Tensor of shape (entries on this rank,), or None.
        vocabulary: Properties of the logits.
    """
    tensors = [tensor for pair in products for tensor in pair]
    return Statistics(*_Statistics.apply(vocabulary, labels, bias, *tensors))  # type: ignore[no-untyped-call]


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vocabulary: Vocabulary, labels: Tensor, bias: Tensor | None, *tensors: Tensor
    ) -> Any:
        inputs, weights = tensors[::2], tensors[1::2]
        shape, device = labels.shape, labels.device
        target, total = (torch.zeros(shape, dtype=vocabulary.accumulation, device=device) for _ in range(2))
        largest = torch.full_like(target, -torch.inf)  # of a rank without entries
        for entries in _slices(weights[0], vocabulary):
            logits = _logits_of(vocabulary, inputs, weights, bias, entries)
            position, is_here = _find_labels(labels, vocabulary, entries)
            target += torch.where(is_here, logits.gather(1, position).squeeze(1), 0)
            if vocabulary.sums_logits:
                total += logits.sum(1)
            # A slice may have no finite logits, as entries whose bias is minus infinity.
            peak = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
            log_sum = logits.sub_(peak[:, None]).exp_().sum(1).log_().add_(peak)
            del logits
            largest = torch.logaddexp(largest, log_sum)
        statistics = target, largest, total
        if vocabulary.group is not None:
            statistics = _combine(statistics, vocabulary.group)
        ctx.vocabulary = vocabulary
        ctx.save_for_backward(labels, bias, statistics[1], *tensors)
        return statistics

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():  # `once_differentiable` takes gradients by weights for constants
            raise StateError(
                "lm_loss has no second derivative: backward was called with create_graph=True. Compute the "
                "logits and torch's cross_entropy for a loss of gradients."
            )
        labels, saved_bias, log_sum, *saved = ctx.saved_tensors
        bias = None if saved_bias is None else saved_bias.detach()
        tensors = [tensor.detach() for tensor in saved]
        vocabulary: Vocabulary = ctx.vocabulary
        inputs, weights = tensors[::2], tensors[1::2]
        needs_bias, needs = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        of_bias = torch.empty_like(saved_bias) if needs_bias else None
        of_inputs = [
            torch.zeros_like(tensor, dtype=vocabulary.accumulation) if needed else None
            for tensor, needed in zip(inputs, needs[::2], strict=True)
        ]
        of_weights = [
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip(weights, needs[1::2], strict=True)
        ]
        for entries in _slices(weights[0], vocabulary):
            with torch.enable_grad():  # marks recomputation, which is not counted as model FLOPs
                logits = _logits_of(vocabulary, inputs, weights, bias, entries)
            of_logits = _gradient_of_logits(vocabulary, logits, labels, log_sum, gradients, entries)
            del logits
            if of_bias is not None:
                of_bias[entries] = of_logits.sum(0)
            for index, dtype in enumerate(vocabulary.dtypes):
                low = of_logits.to(dtype)
                of_input, of_weight = of_inputs[index], of_weights[index]
                if of_input is not None:
                    of_input += low @ weights[index][entries].to(dtype)
                if of_weight is not None:
                    of_weight[entries] = low.T @ inputs[index].to(dtype)
            del of_logits, low
        reduced = [
            None if each is None else _sum_over_ranks(each.to(tensor.dtype), vocabulary.group)
            for each, tensor in zip(of_inputs, inputs, strict=True)
        ]
        pairs = (each for pair in zip(reduced, of_weights, strict=True) for each in pair)
        return None, None, of_bias, *pairs


def _slices(weight: Tensor, vocabulary: Vocabulary) -> Iterator[slice]:
    """Yields slices of the entries on this rank."""
    for start in range(0, weight.shape[0], vocabulary.slice_size):
        yield slice(start, min(start + vocabulary.slice_size, weight.shape[0]))


def _logits_of(
    vocabulary: Vocabulary,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    entries: slice,
) -> Tensor:
    """Returns a new tensor with the logits of a slice, of shape (N, entries of the slice)."""
    logits: Tensor | None = None
    for inner, weight, dtype in zip(inputs, weights, vocabulary.dtypes, strict=True):
        added = None if bias is None or logits is not None else bias[entries].to(dtype)
        product = nn.functional.linear(inner.to(dtype), weight[entries].to(dtype), added)
        logits = product.to(vocabulary.accumulation) if logits is None else logits.add_(product)
    assert logits is not None
    if vocabulary.scale != 1.0:
        logits *= vocabulary.scale
    if vocabulary.soft_cap is not None:
        logits.div_(vocabulary.soft_cap).tanh_().mul_(vocabulary.soft_cap)
    return logits


def _find_labels(labels: Tensor, vocabulary: Vocabulary, entries: slice) -> tuple[Tensor, Tensor]:
    """Returns the positions of labels in a slice, of shape (N, 1), and whether each is in it."""
    position = labels - (vocabulary.first + entries.start)
    size = entries.stop - entries.start
    is_here = (position >= 0) & (position < size)
    return position.clamp_(0, size - 1)[:, None], is_here


def _gradient_of_logits(
    vocabulary: Vocabulary,
    logits: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    gradients: Sequence[Tensor],
    entries: slice,
) -> Tensor:
    """Returns the gradient by the logits of a slice before scale and cap, and may overwrite them."""
    of_target, of_log_sum, of_total = gradients
    slope = None
    if vocabulary.soft_cap is not None:
        slope = logits.div(vocabulary.soft_cap).square_().neg_().add_(1)
    result = logits.sub_(log_sum[:, None]).exp_().mul_(of_log_sum[:, None])
    position, is_here = _find_labels(labels, vocabulary, entries)
    result.scatter_add_(1, position, torch.where(is_here, of_target, 0)[:, None])
    if vocabulary.sums_logits:
        result += of_total[:, None]
    if slope is not None:
        result *= slope
    return result if vocabulary.scale == 1.0 else result.mul_(vocabulary.scale)


def _combine(statistics: Sequence[Tensor], group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the statistics over the entries of all ranks of a group, in one collective."""
    own = torch.stack(list(statistics))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    target, log_sum, total = torch.stack(parts).unbind(1)
    return target.sum(0), log_sum.logsumexp(0), total.sum(0)


def _sum_over_ranks(gradient: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the gradient by inputs that all ranks of a group have, as each rank has other entries."""
    if group is not None:
        dist.all_reduce(gradient, group=group)
    return gradient
