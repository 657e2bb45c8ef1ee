"""Exchange of attention heads for sequences by all-to-all, and joins of the shards of sequences.

Source: Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.base import ConfigurationError
from accelerate.strategies.axes.sequence_shards import SequenceShards

HEADS, SEQUENCE = 1, 2
"""Dimensions of queries, keys and values, which have shape [batch, heads, sequence, size]."""


def repeats_of(query_heads: int, key_heads: int, ranks: int) -> int:
    """Returns how often heads of keys and values are repeated, so that each rank gets those of its queries.

    Raises:
        ConfigurationError: The number of ranks does not divide the number of heads.
    """
    if query_heads % ranks:
        raise ConfigurationError(
            f"An attention layer has {query_heads} heads on each rank, which sp_size={ranks} does not "
            "divide. Choose an sp_size that divides them (with tp_size, divide the heads by it first)."
        )
    return lcm(key_heads, ranks) // key_heads


def to_heads(tensors: Sequence[Tensor], shards: SequenceShards) -> tuple[Tensor, ...]:
    """Returns whole sequences of the heads of this rank, from its positions of all heads.

    Called on all ranks of the group. The tensors are sent in one all-to-all, and so are their gradients.

    Args:
        tensors: Tensors of shape [batch, heads, positions of this rank, size].

    Returns:
        Tensors of shape [batch, heads / ranks, length, size].
    """
    exchange: Callable[..., tuple[Tensor, ...]] = _ToHeads.apply
    return exchange(shards, *tensors)


def to_sequences(tensor: Tensor, shards: SequenceShards) -> Tensor:
    """Returns the positions of this rank of all heads, from whole sequences of its heads.

    It is the inverse of `to_heads`. Called on all ranks of the group.
    """
    exchange: Callable[..., tuple[Tensor]] = _ToSequences.apply
    return exchange(shards, tensor)[0]


class _ToHeads(torch.autograd.Function):
    """All-to-all from shards of sequences to shards of heads."""

    @staticmethod
    def forward(ctx: Any, shards: SequenceShards, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shards = shards
        ranks = len(shards.sizes)
        sent = [tensor.chunk(ranks, HEADS) for tensor in tensors]
        shapes = [
            [(*chunks[0].shape[:SEQUENCE], size, *chunks[0].shape[SEQUENCE + 1 :]) for size in shards.sizes]
            for chunks in sent
        ]
        return tuple(torch.cat(parts, SEQUENCE) for parts in _exchange(sent, shapes, shards.group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exchange: Callable[..., tuple[Tensor, ...]] = _ToSequences.apply
        return None, *exchange(ctx.shards, *gradients)


class _ToSequences(torch.autograd.Function):
    """All-to-all from shards of heads to shards of sequences."""

    @staticmethod
    def forward(ctx: Any, shards: SequenceShards, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shards = shards
        sent = [torch.split(tensor, list(shards.sizes), SEQUENCE) for tensor in tensors]
        shapes = [[tuple(chunks[shards.rank].shape)] * len(shards.sizes) for chunks in sent]
        return tuple(torch.cat(parts, HEADS) for parts in _exchange(sent, shapes, shards.group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exchange: Callable[..., tuple[Tensor, ...]] = _ToHeads.apply
        return None, *exchange(ctx.shards, *gradients)


def _exchange(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], group: Any
) -> list[list[Tensor]]:
    """Sends chunks of several tensors in one all-to-all, and returns the received ones.

    Args:
        sent: Chunks of each tensor, one for each rank.
        shapes: Shapes of the received chunks of each tensor, one for each rank.
    """
    ranks = range(len(shapes[0]))
    buffer = torch.cat([chunks[rank].reshape(-1) for rank in ranks for chunks in sent])
    counts = [[torch.Size(each[rank]).numel() for each in shapes] for rank in ranks]
    received = buffer.new_empty(sum(map(sum, counts)))
    dist.all_to_all_single(
        received,
        buffer,
        [sum(each) for each in counts],
        [sum(chunks[rank].numel() for chunks in sent) for rank in ranks],
        group=group,
    )
    parts = iter(torch.split(received, [count for each in counts for count in each]))
    by_rank = [[next(parts) for _ in shapes] for _ in ranks]
    return [[by_rank[rank][i].view(each[rank]) for rank in ranks] for i, each in enumerate(shapes)]


def join(tensor: Tensor, dim: int, shards: SequenceShards) -> Tensor:
    """Returns whole sequences on each rank, with gradients that are summed over the ranks.

    Called on all ranks of the group.

    Args:
        tensor: Positions of this rank.
        dim: Dimension of the positions.
    """
    gather: Callable[..., Tensor] = _Join.apply
    return gather(tensor, dim, shards)


class _Join(torch.autograd.Function):
    """All-gather of the shards of sequences."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, shards: SequenceShards) -> Tensor:
        ctx.dim, ctx.shards = dim, shards
        missing = max(shards.sizes) - shards.own  # all-gathers take tensors of one shape
        own = tensor.detach()
        if missing:
            padding = own.new_zeros((*own.shape[:dim], missing, *own.shape[dim + 1 :]))
            own = torch.cat([own, padding], dim)
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in shards.sizes]
        dist.all_gather(parts, own, group=shards.group)
        sizes = zip(parts, shards.sizes, strict=True)
        return shards.assemble([part.narrow(dim, 0, size) for part, size in sizes], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        shards: SequenceShards = ctx.shards
        chunks = [shards.shard(gradients[0], ctx.dim, rank) for rank in range(len(shards.sizes))]
        shapes = [tuple(chunks[shards.rank].shape)] * len(chunks)
        (received,) = _exchange([chunks], [shapes], shards.group)
        return torch.stack(received).sum(0), None, None


def sum_over(shards: SequenceShards, *values: Tensor) -> list[Tensor]:
    """Returns the sums of scalars over the ranks, without gradients."""
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    total = torch.stack([value.detach().to(dtype) for value in values])
    dist.all_reduce(total, group=shards.group)
    return list(total.unbind())


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchanged(attend: Attend, query: Tensor, key: Tensor, value: Tensor, shards: SequenceShards) -> Tensor:
    """Computes attention over the positions of all ranks that exchange heads, with the heads of this rank.

    Called on all ranks of the group, and communicates twice.

    Args:
        attend: Attention, from tensors of shape [batch, heads, positions of these ranks, size] to such a
            tensor.
        query: Queries of shape [batch, heads, positions of this rank, size].
        key: Keys, which may have fewer heads.

    Raises:
        ConfigurationError: The heads cannot be divided.
    """
    shards = shards.exchange
    repeats = repeats_of(query.shape[HEADS], key.shape[HEADS], len(shards.sizes))
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, HEADS) for each in (key, value))
    query, key, value = to_heads((query, key, value), shards)
    return to_sequences(attend(query, key, value), shards)
