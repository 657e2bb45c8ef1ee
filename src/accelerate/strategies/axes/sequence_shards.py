"""Shards of the sequences of a batch, of which each rank has some positions."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class SequenceShards(NamedTuple):
    """Shards of the sequences of one batch, of which each rank has consecutive positions.

    Attributes:
        group: Process group of the ranks.
        rank: Rank of this process in the group.
        sizes: Number of positions of each rank, which differ by at most 1.
    """

    group: Any
    rank: int
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Positions of whole sequences."""
        return sum(self.sizes)

    @property
    def own(self) -> int:
        """Positions of this rank."""
        return self.sizes[self.rank]

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the positions of this rank of whole sequences."""
        return tensor.narrow(dim, sum(self.sizes[: self.rank]), self.own)

    def heads(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the entries of a dimension that belong to the heads of this rank."""
        size = tensor.shape[dim] // len(self.sizes)
        return tensor.narrow(dim, self.rank * size, size)


def divide(length: int, group: Any) -> SequenceShards:
    """Returns the shards of sequences of a length, without padding."""
    ranks = group.size()
    sizes = tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))
    return SequenceShards(group, group.rank(), sizes)
