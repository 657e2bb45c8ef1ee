"""Iterable datasets that share themselves out: which do, how, and whether they do so alike on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerate.ops import Transport

_DEPTH = 12


class OwnShare(NamedTuple):
    """What a dataset offers to a group.

    Attributes:
        dataset: The share of the group, read instead of the whole.
        why: How it came about, for people.
        is_given: Whether the user has shared it out, so that nobody can read the whole.
    """

    dataset: Any
    why: str
    is_given: bool = False


def own_share(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Return the share of one group in a dataset that shares itself out; None for one that does not.

    All shares together are the dataset, each sample once; they may differ in length.

    Args:
        dataset: An iterable dataset.
        groups: Number of data-parallel groups.
        group: Which of them, from 0.
    """
    shares = (way(dataset, groups, group) for way in _WAYS)
    return next((share for share in shares if share is not None), None)


def is_the_same_everywhere(dataset: Any, transport: Transport) -> bool:
    """Whether a dataset will give the same samples in the same order on all ranks; called on all of them.

    What makes one differ are random generators with seeds of their own: all that it holds are compared, with
    the number of its shards.

    Args:
        dataset: One that shares itself out.
        transport: The wire between the ranks.
    """
    mine = (_num_shards(dataset), [_state_of(generator) for generator in _generators_within(dataset)])
    return all(other == mine for other in transport.gather_object(mine))


def _by_datasets(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Streams of the library `datasets`: by their files, or by every n-th sample."""
    if not type(dataset).__module__.startswith("datasets."):
        return None
    given = getattr(dataset, "_distributed", None)
    if given is not None:
        is_ours = (given.rank, given.world_size) == (group, groups)
        return OwnShare(dataset, "shared out by split_dataset_by_node", True) if is_ours else None
    from datasets.distributed import split_dataset_by_node

    share = split_dataset_by_node(dataset, rank=group, world_size=groups)
    return OwnShare(share, "the dataset shares itself out, by split_dataset_by_node")


def _by_webdataset(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Pipelines of the library `webdataset` in which a stage takes the shards of this process."""
    stages = getattr(dataset, "pipeline", None)
    if not type(dataset).__module__.startswith("webdataset.") or not isinstance(stages, list):
        return None
    splits = any(getattr(stage, "__name__", None) == "split_by_node" for stage in stages)
    return OwnShare(dataset, "shared out by split_by_node", True) if splits else None


def _by_shards(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Anything with `shard(num_shards=, index=)` that says that it has as many shards as there are groups."""
    shard, num_shards = getattr(dataset, "shard", None), _num_shards(dataset)
    if not callable(shard) or num_shards is None or num_shards < groups:
        return None
    return OwnShare(shard(num_shards=groups, index=group), f"the dataset shares its {num_shards} shards out")


_WAYS: tuple[Callable[[Any, int, int], OwnShare | None], ...] = (_by_datasets, _by_webdataset, _by_shards)
"""Each way for a dataset to share itself out; the first that answers counts."""


def _num_shards(dataset: Any) -> int | None:
    for name in ("num_shards", "n_shards"):
        number = getattr(dataset, name, None)
        if isinstance(number, int):
            return number
    return None


def _generators_within(dataset: Any) -> list[Any]:
    """The random generators that a dataset, or what it is made of, holds."""
    package = type(dataset).__module__.partition(".")[0]
    kinds = tuple(_ways_of_state())
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> Iterator[Any]:
        if depth > _DEPTH or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, kinds):
            yield value
            return
        for part in _parts_of(value, package):
            yield from walk(part, depth + 1)

    return list(walk(dataset, 0))


def _parts_of(value: Any, package: str) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    is_of_the_dataset = type(value).__module__.partition(".")[0] == package
    return list(vars(value).values()) if is_of_the_dataset and hasattr(value, "__dict__") else []


@cache
def _ways_of_state() -> dict[type, Callable[[Any], Any]]:
    """What gives the state of each kind of generator; numpy loads its own when they are asked for."""
    return {
        torch.Generator: lambda generator: generator.get_state().tolist(),
        random.Random: lambda generator: generator.getstate(),
        np.random.Generator: lambda generator: repr(generator.bit_generator.state),
        np.random.RandomState: lambda generator: repr(generator.get_state()),
    }


def _state_of(generator: Any) -> Any:
    ways = _ways_of_state().items()
    return next(state(generator) for kind, state in ways if isinstance(generator, kind))
