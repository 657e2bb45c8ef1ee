"""Who reads which batch of a loader: decided once, from the loader, the mesh, the settings, and its dataset.

Iterable datasets may shard themselves: which do, and how, is here too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.base import ConfigurationError, wrong_value
from accelerate.data_loader.samplers import IterableDatasetShard, check_split
from accelerate.ops import Transport

_DEPTH = 12  # of objects in a dataset that are searched for random generators
SHARED_AXES = frozenset({"tp", "cp", "sp", "pp"})  # mesh axes whose ranks work on the same batch together


def may_read_own_share(loader: DataLoader[Any], groups: int, *, dispatch: bool | None, given: bool) -> bool:
    """Whether groups read the shares that a dataset makes, instead of process 0 reading for all, or each the
    whole: not where each share would drop its short batch, and always where the user has sharded the dataset.
    With `dispatch=False` the number of shards must divide by that of the groups."""
    if given or dispatch or loader.drop_last:
        return given and not dispatch
    return dispatch is None or (_num_shards(loader.dataset) or 1) % groups == 0


@dataclass(frozen=True)
class ShardPlan:
    """How the batches of one loader reach the data-parallel groups.

    `leave`: one group reads everything. `shard`: each group reads its share. `dataset_shards`: the dataset
    makes a share for each group, of any length. `already_sharded`: the sampler of the user does so.
    `dispatch`: process 0 reads, the others receive.
    """

    how: Literal["leave", "shard", "dataset_shards", "already_sharded", "dispatch"] = "leave"
    groups: int = 1
    group: int = 0
    batch_size: int | None = None  # of one group; None where the loader doesn't build batches of one size
    split: bool = False  # the user's batch is the global one
    even: bool = True  # the short end is filled; always for iterable datasets and dispatched loaders
    why: str = "one process"

    @property
    def own_shares(self) -> bool:
        return self.how in ("dataset_shards", "already_sharded")

    @property
    def batches_in_round(self) -> int:
        """How many batches of the dataset, or of a share that it made, one batch of all groups takes."""
        return 1 if self.split or self.own_shares else self.groups

    @property
    def rows_in_batch(self) -> int | None:
        """Samples in a batch of the dataset, as all groups count them; None where that is not known."""
        if self.batch_size is None:
            return None
        return self.batch_size * self.groups if self.split else self.batch_size

    def __str__(self) -> str:
        share = "" if self.how == "leave" else f", part {self.group} of {self.groups}"
        return f"{self.how}{share} ({self.why})"


BY_HAND = ShardPlan(why="built without prepare")  # the plan of a loader that the user has constructed


def data_groups(mesh: Any, num_processes: int, process_index: int) -> tuple[int, int]:
    """Return the number of data-parallel groups and the one of this process; `SHARED_AXES` share batches."""
    if mesh is None or not mesh.mesh_dim_names or mesh.size() != num_processes:
        return num_processes, process_index
    groups, group = 1, 0
    for name, size, index in zip(mesh.mesh_dim_names, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name not in SHARED_AXES:
            groups, group = groups * size, group * size + index
    return groups, group


def nominal_batch_size(loader: DataLoader[Any]) -> int | None:
    """The batch size of a loader or its batch sampler; None where it declares none."""
    index_sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    size = getattr(index_sampler, "batch_size", None)
    return size if isinstance(size, int) else loader.batch_size


def is_sharded(loader: DataLoader[Any], groups: int, group: int) -> bool:
    """Whether the user's dataset is an `IterableDatasetShard` with the shard of this group."""
    dataset = loader.dataset
    return (
        isinstance(dataset, IterableDatasetShard)
        and dataset.num_processes == groups
        and dataset.process_index == group
    )


def plan(
    loader: DataLoader[Any],
    num_processes: int,
    groups: int,
    group: int,
    *,
    split: bool,
    even: bool,
    dispatch: bool | None,
    put_on_device: bool,
    own_share: str | None = None,
    already_sharded: str | None = None,
) -> ShardPlan:
    """Decide how the batches of a loader are shared; `dispatch=None` decides by the kind of dataset.

    `own_share` and `already_sharded` say why the dataset, or the loader, yields the shard of its rank.
    """
    iterable = isinstance(loader.dataset, IterableDataset)
    if dispatch and not put_on_device:
        raise ConfigurationError(
            "dispatch_batches=True: batches are sent from device to device, and device placement is off. "
            "Leave device placement on, or dispatch_batches off."
        )
    size = nominal_batch_size(loader)
    if split and size is not None:
        check_split(size, groups)
    part = size // groups if split and size is not None else size
    if groups > 1 and not dispatch and is_sharded(loader, groups, group):
        return ShardPlan("shard", groups, group, part, split, why="the dataset is sharded already")
    if own_share is not None:
        return ShardPlan("dataset_shards", groups, group, part, split, why=own_share)
    if already_sharded is not None:
        return ShardPlan("already_sharded", groups, group, part, even=even, why=already_sharded)
    if num_processes > 1 and (dispatch or (dispatch is None and iterable and put_on_device)):
        why = (
            "an iterable dataset may differ between processes; where it gives the same samples in the same "
            "order in each of them, dispatch_batches=False lets each read its share"
        )
        return ShardPlan("dispatch", groups, group, part, split, why="asked for" if dispatch else why)
    if groups == 1:
        why = "one process" if num_processes == 1 else "all processes share each batch"
        return ShardPlan("leave", batch_size=size, split=split, even=even, why=why)
    why = "each process iterates the whole dataset" if iterable else "by the batch sampler"
    return ShardPlan("shard", groups, group, part, split, even or iterable, why)


# Datasets that shard themselves


class OwnShare(NamedTuple):
    """The shard of a group that a dataset makes itself; `is_given` where the user has sharded the dataset."""

    dataset: Any
    why: str
    is_given: bool = False


def own_share(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Return the shard of one group in a dataset that shards itself, of any length; else None."""
    library = _package_of(dataset)
    if library == "datasets":  # streams: by their files, or by every n-th sample
        given = getattr(dataset, "_distributed", None)
        if given is None:
            from datasets.distributed import split_dataset_by_node

            share = split_dataset_by_node(dataset, rank=group, world_size=groups)
            return OwnShare(share, "the dataset shards itself, by split_dataset_by_node")
        if (given.rank, given.world_size) == (group, groups):
            return OwnShare(dataset, "sharded by split_dataset_by_node", True)
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
        return OwnShare(dataset, "sharded by split_by_node", True)
    shard, num_shards = getattr(dataset, "shard", None), _num_shards(dataset)
    if not callable(shard) or num_shards is None or num_shards < groups:
        return None
    return OwnShare(shard(num_shards=groups, index=group), f"the dataset has {num_shards} shards")


def is_the_same_everywhere(dataset: Any, transport: Transport) -> bool:
    """Whether a dataset yields the same samples in the same order on all ranks; called on all of them.
    Compared are the states of all random generators in it, and the number of its shards."""
    own = (_num_shards(dataset), generator_states(dataset))
    return all(facts == own for facts in transport.gather_object(own))


def _num_shards(dataset: Any) -> int | None:
    for name in ("num_shards", "n_shards"):
        number = getattr(dataset, name, None)
        if isinstance(number, int):
            return number
    return None


def generator_states(dataset: Any) -> list[Any]:
    """The states of the random generators that a dataset, or what it is made of, holds."""
    package = _package_of(dataset)
    getters: dict[type, Callable[[Any], Any]] = {
        torch.Generator: lambda generator: generator.get_state().tolist(),
        random.Random: lambda generator: generator.getstate(),
        np.random.Generator: lambda generator: repr(generator.bit_generator.state),
        np.random.RandomState: lambda generator: repr(generator.get_state()),
    }
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> Iterator[Any]:
        if depth > _DEPTH or id(value) in seen:
            return
        seen.add(id(value))
        parts: Iterable[Any] = ()
        if isinstance(value, tuple(getters)):
            yield next(get_state(value) for kind, get_state in getters.items() if isinstance(value, kind))
        elif isinstance(value, Mapping):
            parts = value.values()
        elif isinstance(value, (list, tuple)):
            parts = value
        elif _package_of(value) == package and hasattr(value, "__dict__"):
            parts = vars(value).values()
        for part in list(parts):
            yield from walk(part, depth + 1)

    return list(walk(dataset, 0))


def _package_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
