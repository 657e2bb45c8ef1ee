"""Plan of the owners of matrices, and of the parts that ranks send to owners and receive from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from accelerate.base import PreparationError
from accelerate.checkpointing import Box, Shape


@dataclass(frozen=True)
class LocalBox:
    """Box of one parameter that is on one rank, or None for an empty shard."""

    shape: Shape  # of the whole parameter
    dtype: torch.dtype
    box: Box | None


@dataclass(frozen=True)
class Matrix:
    """Parameter that is stepped as a whole by the rank that owns it.

    Attributes:
        key: Key of the parameter, which is equal on all ranks.
        owner: Rank that steps it.
        sources: Boxes that make up the parameter, each with the rank from which the owner takes it.
        copies: Boxes on other ranks, which the owner updates.
    """

    key: str
    shape: Shape
    dtype: torch.dtype
    owner: int
    sources: tuple[tuple[int, Box], ...]
    copies: tuple[tuple[int, Box], ...]

    @property
    def is_whole(self) -> bool:
        """True if the owner has the whole parameter in one box."""
        return self.sources == ((self.owner, ((0,) * len(self.shape), self.shape)),)


def plan_owners(ranks: Sequence[Mapping[str, LocalBox]], known: Mapping[str, int]) -> list[Matrix]:
    """Returns the matrices of an optimizer with their owners, which own about the same number of bytes.

    Args:
        ranks: Boxes of each rank by the keys of parameters.
        known: Owners of parameters that have one already.

    Raises:
        PreparationError: The boxes do not make up a parameter.
    """
    first: dict[str, LocalBox] = {}
    for local in ranks:
        for key, held in local.items():
            first.setdefault(key, held)
    loads = [0] * len(ranks)
    owners = dict(known)
    sizes = {key: math.prod(held.shape) * held.dtype.itemsize for key, held in first.items()}
    for key in first:
        if key in owners:
            loads[owners[key]] += sizes[key]
    for key in sorted(first, key=sizes.__getitem__, reverse=True):
        if key not in owners:
            holders = [rank for rank, local in enumerate(ranks) if key in local]
            owners[key] = min(holders, key=loads.__getitem__)
            loads[owners[key]] += sizes[key]
    return [_plan(key, held, owners[key], ranks) for key, held in first.items()]


def _plan(key: str, like: LocalBox, owner: int, ranks: Sequence[Mapping[str, LocalBox]]) -> Matrix:
    boxes = [(rank, local[key].box) for rank, local in enumerate(ranks) if key in local]
    held = [(rank, box) for rank, box in boxes if box is not None]
    sources: dict[Box, int] = {}
    for rank, box in sorted(held, key=lambda pair: abs(pair[0] - owner)):  # mostly of the same node
        sources.setdefault(box, rank)
    if sum(math.prod(sizes) for _, sizes in sources) != math.prod(like.shape):
        raise PreparationError(
            f"The shards of {key} with the shape {like.shape} overlap or are incomplete, so no rank can step "
            "it as a whole. Pass whole_matrices=False to prepare() to step its shards."
        )
    return Matrix(
        key,
        like.shape,
        like.dtype,
        owner,
        tuple((rank, box) for box, rank in sorted(sources.items())),
        tuple((rank, box) for rank, box in held if rank != owner),
    )


def by_dtype(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Returns the matrices in buckets, each of which needs an all-to-all in each direction."""
    buckets: dict[torch.dtype, list[Matrix]] = {}
    for matrix in matrices:
        buckets.setdefault(matrix.dtype, []).append(matrix)
    return list(buckets.values())
