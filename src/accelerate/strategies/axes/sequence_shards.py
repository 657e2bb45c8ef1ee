"""Shards of the sequences of a batch, of which each rank has some positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerate.base import ConfigurationError, wrong_value

Ranges = tuple[tuple[int, int], ...]
"""First positions of ranges, and the positions after their ends."""


class SequenceRanks(NamedTuple):
    """Ranks that divide each sequence.

    Attributes:
        group: Process group of all of them.
        exchange: Process group of those that exchange heads.
        ring: Device mesh of those that exchange keys and values by context parallelism, or None without it.
            Ranks of the same group `exchange` are neighbors in `group`.
    """

    group: Any
    exchange: Any
    ring: Any = None

    @property
    def sizes(self) -> str:
        """Sizes of the axes as a program gives them."""
        of_heads = f"sp_size={self.exchange.size()}"
        return of_heads if self.ring is None else f"cp_size={self.ring.size()} with {of_heads}"

    @property
    def ones(self) -> str:
        """Sizes of the axes with which no sequence is divided."""
        return "sp_size=1" if self.ring is None else "cp_size=1 and sp_size=1"


class SequenceShards(NamedTuple):
    """Shards of the sequences of one batch.

    Attributes:
        rank: Rank of this process in their group.
        ranges: Positions of each rank.
    """

    ranks: SequenceRanks
    rank: int
    ranges: tuple[Ranges, ...]

    @property
    def group(self) -> Any:
        """Process group of the ranks."""
        return self.ranks.group

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(map(_size, self.ranges))

    @property
    def length(self) -> int:
        """Positions of whole sequences."""
        return sum(self.sizes)

    @property
    def own(self) -> int:
        """Positions of this rank."""
        return _size(self.ranges[self.rank])

    def shard(self, tensor: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """Returns the positions of a rank of whole sequences, by default those of this rank."""
        ranges = self.ranges[self.rank if rank is None else rank]
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def assemble(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Returns whole sequences from the positions of each rank."""
        parts: dict[int, Tensor] = {}
        for shard, ranges in zip(shards, self.ranges, strict=True):
            sizes = [stop - start for start, stop in ranges]
            parts.update(zip((start for start, _ in ranges), torch.split(shard, sizes, dim), strict=True))
        return torch.cat([parts[start] for start in sorted(parts)], dim)

    def heads(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the entries of a dimension that belong to the heads of this rank."""
        ranks = self.ranks.exchange.size()
        size = tensor.shape[dim] // ranks
        return tensor.narrow(dim, self.rank % ranks * size, size)

    @property
    def exchange(self) -> SequenceShards:
        """Shards of the positions that the ranks have which exchange heads with this one."""
        if self.ranks.ring is None:
            return self
        size = self.ranks.exchange.size()
        block = self.rank // size
        sizes = self.sizes[block * size : (block + 1) * size]
        return consecutive(SequenceRanks(self.ranks.exchange, self.ranks.exchange), self.rank % size, sizes)

    @property
    def blocks(self) -> SequenceShards | None:
        """Shards of the ranks of the ring, which have some heads of their positions after the exchange."""
        if self.ranks.ring is None:
            return None
        group, size = self.ranks.ring.get_group(), self.ranks.exchange.size()
        starts = range(0, len(self.ranges), size)
        ranges = tuple(sum(self.ranges[start : start + size], ()) for start in starts)
        return SequenceShards(SequenceRanks(group, group), self.rank // size, ranges)


def checked_buffers(
    buffers: Sequence[Tensor] | None, dims: Sequence[int] | None
) -> tuple[list[Tensor], list[int]]:
    """Returns the buffers of `maybe_context_parallel` and the dimension of the sequences in each.

    Raises:
        ConfigurationError: There are no buffers, or a dimension is missing or wrong.
    """
    given: dict[str, object] = {"buffers": buffers, "buffer_seq_dims": dims}
    for name, values in given.items():
        if isinstance(values, (Tensor, int)):
            kind = type(values).__name__
            raise wrong_value(name, kind, "there may be several, so it takes a list", f"Write {name}=[...]")
    buffers, dims = list(buffers or ()), list(dims or ())
    if not buffers:
        raise ConfigurationError(
            "accelerator.maybe_context_parallel got no buffers, so no sequence would be split. Pass the "
            "tensors of the batch that have a sequence dimension, and in buffer_seq_dims the dimension of "
            "each."
        )
    if len(buffers) != len(dims):
        reason = f"it has {len(dims)} entries for {len(buffers)} buffers"
        raise wrong_value("buffer_seq_dims", dims, reason, "Give the sequence dimension of each buffer")
    for buffer, dim in zip(buffers, dims, strict=True):
        if not -buffer.ndim <= dim < buffer.ndim:
            reason = f"a buffer has shape {list(buffer.shape)}"
            raise wrong_value("buffer_seq_dims", dim, reason, "Name one of its dims")
    return buffers, dims


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def consecutive(ranks: SequenceRanks, rank: int, sizes: Sequence[int]) -> SequenceShards:
    """Returns shards of consecutive positions, of certain sizes."""
    return SequenceShards(ranks, rank, tuple((each,) for each in pairwise(accumulate(sizes, initial=0))))


def divide(length: int, ranks: SequenceRanks) -> SequenceShards:
    """Returns the shards of sequences of a length, without padding.

    Ranks that exchange heads have numbers of positions that differ by at most 1. With a ring, each of its
    ranks has a chunk from each end of the sequences, because later positions attend to more positions. The
    last chunks may be shorter than others, and ranks may have no positions in sequences that are too short.
    """
    size = ranks.exchange.size()
    shards = [part for block in _blocks(length, ranks) for part in _split(block, size)]
    return SequenceShards(ranks, ranks.group.rank(), tuple(shards))


def _blocks(length: int, ranks: SequenceRanks) -> list[Ranges]:
    """Returns the positions of each rank of the ring."""
    if ranks.ring is None:
        return [((0, length),)]
    size, chunk = ranks.ring.size(), chunk_of(length, ranks)
    chunks = [(min(i * chunk, length), min((i + 1) * chunk, length)) for i in range(2 * size)]
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(size)]


def chunk_of(length: int, ranks: SequenceRanks) -> int:
    """Returns the positions of a chunk, of which each rank of the ring has two."""
    size: int = ranks.ring.size()
    return -(-length // (2 * size))


def _split(ranges: Ranges, size: int) -> list[Ranges]:
    """Returns parts of positions whose sizes differ by at most 1."""
    total = _size(ranges)
    sizes = [total // size + (i < total % size) for i in range(size)]
    return [_between(ranges, start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _between(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Returns the ranges from one of their positions to another one."""
    found, before = [], 0
    for first, last in ranges:
        begin, end = max(start - before, 0), min(stop - before, last - first)
        if begin < end:
            found.append((first + begin, first + end))
        before += last - first
    return tuple(found) or ((0, 0),)
