"""Iterable datasets that shard themselves, and the states of their random generators.

`prepare.py` searches for the shard of a group before it plans a loader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from accelerate.base import wrong_value
from accelerate.ops import Transport
from accelerate.rng import find_generators, package_of, state_of


class NativeShard(NamedTuple):
    """Shard of a group that a dataset makes itself."""

    dataset: Any
    reason: str  # for messages
    is_given: bool = False  # the user has sharded the dataset


def native_shard(dataset: object, groups: int, group: int) -> NativeShard | None:
    """Returns the shard of one group of a dataset that shards itself, of any length, or None."""
    library = package_of(dataset)
    if library == "datasets":  # streams: by their files, or by every n-th sample
        given = getattr(dataset, "_distributed", None)
        if given is None:
            from datasets.distributed import split_dataset_by_node

            shard = split_dataset_by_node(dataset, rank=group, world_size=groups)
            return NativeShard(shard, "the dataset shards itself, by split_dataset_by_node")
        if (given.rank, given.world_size) == (group, groups):
            return NativeShard(dataset, "sharded by split_dataset_by_node", True)
        if given.world_size > 1:
            raise wrong_value(
                "split_dataset_by_node",
                f"rank={given.rank}, world_size={given.world_size}",
                f"this process is data-parallel rank {group} of {groups}, so the shards do not fit the run",
                f"use rank={group} and world_size={groups}, or leave the sharding to prepare; "
                "already_sharded=True keeps the dataset of each rank as it is",
            )
    stages = getattr(dataset, "pipeline", None) if library == "webdataset" else None
    stages = stages if isinstance(stages, list) else []
    if any(getattr(stage, "__name__", None) == "split_by_node" for stage in stages):
        return NativeShard(dataset, "sharded by split_by_node", True)
    make_shard, num_shards = getattr(dataset, "shard", None), _num_shards(dataset)
    if not callable(make_shard) or num_shards is None or num_shards < groups:
        return None
    return NativeShard(make_shard(num_shards=groups, index=group), f"the dataset has {num_shards} shards")


def may_read_native_shard(
    loader: DataLoader[Any], groups: int, *, dispatch: bool | None, given: bool
) -> bool:
    """Returns whether groups read the shards that a dataset makes, instead of sharding the whole dataset.

    They always do if the user has sharded the dataset (`given`). Otherwise they do not with `drop_last`,
    which would drop the short batch of each shard. With `dispatch=False` the number of shards must be a
    multiple of the number of groups.
    """
    if given or dispatch or loader.drop_last:
        return given and not dispatch
    return dispatch is None or (_num_shards(loader.dataset) or 1) % groups == 0


def is_the_same_everywhere(dataset: object, transport: Transport) -> bool:
    """Returns whether a dataset yields the same samples in the same order on all ranks.

    Called on all ranks. The states of all random generators in the dataset, and the number of its shards, are
    compared.
    """
    own = (_num_shards(dataset), generator_states(dataset))
    return all(facts == own for facts in transport.gather_object(own))


def _num_shards(dataset: object) -> int | None:
    for name in ("num_shards", "n_shards"):
        number = getattr(dataset, name, None)
        if isinstance(number, int):
            return number
    return None


def generator_states(dataset: object) -> list[Any]:
    """Returns the states of the random generators in a dataset and in its objects of the same package."""
    states = map(state_of, find_generators(dataset))
    return [state.tolist() if isinstance(state, torch.Tensor) else repr(state) for state in states]
