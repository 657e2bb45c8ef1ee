"""Plan of a loader, which defines the data-parallel group that reads each batch.

`prepare_data_loader` makes the plan once, from the loader, the mesh and the settings. The prepared loader
keeps it as `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.base import ConfigurationError
from accelerate.data_loader.iterable_shard import IterableDatasetShard
from accelerate.data_loader.samplers import check_split
from accelerate.parallelism_config import Data, axes_with

SHARED_AXES = frozenset(axes_with(Data.SEQUENCES, Data.COPIES))
"""Mesh dimensions along which ranks get the same batch."""


@dataclass(frozen=True)
class ShardPlan:
    """Distribution of the batches of one loader over the data-parallel groups.

    Attributes:
        mode: "unsharded": one group reads all batches. "shard": each group reads its shard. "dataset_shards":
            the dataset makes a shard for each group, of any length. "already_sharded": the sampler of the
            user yields a shard. "dispatch": rank 0 reads, the others receive.
        groups: Number of data-parallel groups.
        group: Data-parallel group of this process.
        batch_size: Batch size of one group; None if the loader does not build batches of one size.
        split: Whether the batch of the user is the global batch.
        even: Whether the end of the epoch is padded; always for iterable datasets and dispatched loaders.
        replicates: Whether several ranks of a group get the same batch.
        uses_dispatcher: Whether the loader is a `DataLoaderDispatcher`, also on one process.
        global_batch_size: Number of samples of one optimizer step; None if it depends on the groups.
        reason: The reason for the mode, for messages.
    """

    mode: Literal["unsharded", "shard", "dataset_shards", "already_sharded", "dispatch"] = "unsharded"
    groups: int = 1
    group: int = 0
    batch_size: int | None = None
    split: bool = False
    even: bool = True
    replicates: bool = False
    uses_dispatcher: bool = False
    global_batch_size: int | None = None
    reason: str = "one process"

    @property
    def has_own_shards(self) -> bool:
        """True if each group reads a shard that the dataset or the user made."""
        return self.mode in ("dataset_shards", "already_sharded")

    @property
    def batches_per_step(self) -> int:
        """Number of batches of the dataset, or of a shard that it made, that one step of all groups reads."""
        return 1 if self.split or self.has_own_shards else self.groups

    @property
    def rows_in_batch(self) -> int | None:
        """Number of samples in a batch of the dataset, as all groups count them, or None if unknown."""
        if self.batch_size is None:
            return None
        return self.batch_size * self.groups if self.split else self.batch_size

    def __str__(self) -> str:
        part = "" if self.mode == "unsharded" else f", part {self.group} of {self.groups}"
        return f"{self.mode}{part} ({self.reason})"


UNPREPARED = ShardPlan(reason="built without prepare")
"""Plan of a loader that the user has constructed."""


def data_groups(mesh: Any, num_processes: int, process_index: int) -> tuple[int, int]:
    """Returns the number of data-parallel groups and the group of this process.

    Ranks that differ along `SHARED_AXES` only are in one group.
    """
    if mesh is None or not mesh.mesh_dim_names or mesh.size() != num_processes:
        return num_processes, process_index
    groups, group = 1, 0
    for name, size, index in zip(mesh.mesh_dim_names, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name not in SHARED_AXES:
            groups, group = groups * size, group * size + index
    return groups, group


def nominal_batch_size(loader: DataLoader[Any]) -> int | None:
    """Returns the batch size that a loader or its batch sampler declares, or None."""
    index_sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    size = getattr(index_sampler, "batch_size", None)
    return size if isinstance(size, int) else loader.batch_size


def is_sharded(loader: DataLoader[Any], groups: int, group: int) -> bool:
    """Returns whether the dataset of the user is an `IterableDatasetShard` with the shard of this group."""
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
    native_shard: str | None = None,
    already_sharded: str | None = None,
) -> ShardPlan:
    """Decides how the batches of a loader are distributed.

    `dispatch=None` decides by the kind of dataset. `native_shard` and `already_sharded` are the reasons why
    the dataset, or the loader, yields the shard of its rank.
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
    base = ShardPlan(
        "shard", groups, group, part, split, replicates=num_processes > groups, uses_dispatcher=bool(dispatch)
    )
    if groups > 1 and not dispatch and is_sharded(loader, groups, group):
        return replace(base, reason="the dataset is sharded already")
    if native_shard is not None:
        return replace(base, mode="dataset_shards", reason=native_shard)
    if already_sharded is not None:
        return replace(base, mode="already_sharded", split=False, even=even, reason=already_sharded)
    if num_processes > 1 and (dispatch or (dispatch is None and iterable and put_on_device)):
        reason = (
            "an iterable dataset may differ between processes; if it yields the same samples in the same "
            "order in each of them, dispatch_batches=False lets each read its shard"
        )
        reason = "asked for" if dispatch else reason
        return replace(base, mode="dispatch", uses_dispatcher=True, reason=reason)
    if groups == 1:
        reason = "one process" if num_processes == 1 else "all processes get the same batches"
        return replace(base, mode="unsharded", batch_size=size, even=even, reason=reason)
    reason = "each process iterates the whole dataset" if iterable else "by the batch sampler"
    return replace(base, even=even or iterable, reason=reason)
