"""Who reads which batch of a loader: decided once, from the loader, the mesh and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.base import ConfigurationError, wrong_value
from accelerate.data_loader.iterable import IterableDatasetShard

SHARED_AXES = frozenset({"tp", "cp", "sp", "pp"})
"""Mesh axes whose ranks work on the same batch together."""


def may_read_own_share(loader: DataLoader[Any], *, dispatch: bool | None, given: bool) -> bool:
    """Whether groups read the shares that a dataset makes, instead of process 0 reading for all.

    The samples have to be the same: if each share dropped its short batch, others would be missing. A dataset
    that the user has sharded cannot be read otherwise.
    """
    return not dispatch if given else dispatch is None and not loader.drop_last


_WHY_DISPATCH = (
    "an iterable dataset may differ between processes; where it gives the same samples in the same order in "
    "each of them, dispatch_batches=False lets each read its share"
)


@dataclass(frozen=True)
class ShardPlan:
    """How the batches of one loader reach the data-parallel groups.

    Attributes:
        how: `leave` (one group reads everything), `shard` (each group reads its share), `dataset_shards` (the
            dataset makes a share for each group, of any length) or `dispatch` (process 0 reads, the others
            receive).
        batch_size: Batch size of one group, None where the user's loader doesn't build batches of one size
            itself.
        split: Whether the user's batch is the global one.
        even: Whether the short end is filled; always so for iterable datasets and dispatched loaders.
    """

    how: Literal["leave", "shard", "dataset_shards", "dispatch"] = "leave"
    groups: int = 1
    group: int = 0
    batch_size: int | None = None
    split: bool = False
    even: bool = True
    why: str = "one process"

    @property
    def own_shares(self) -> bool:
        """Whether groups read shares that the dataset makes, of any length."""
        return self.how == "dataset_shards"

    @property
    def batches_in_round(self) -> int:
        """How many batches of the dataset, or of a share that it made, one batch of all groups takes."""
        return 1 if self.split or self.own_shares else self.groups

    @property
    def batches_per_step(self) -> int:
        """How many batches of torch's loader make one batch of the prepared one."""
        return self.batches_in_round if self.how == "dispatch" else 1

    @property
    def rows_in_batch(self) -> int | None:
        """Samples in a batch of the dataset, as all groups count them; None where that is not known."""
        if self.batch_size is None:
            return None
        return self.batch_size * self.groups if self.split else self.batch_size

    def __str__(self) -> str:
        share = "" if self.how == "leave" else f", part {self.group} of {self.groups}"
        return f"{self.how}{share} ({self.why})"


BY_HAND = ShardPlan(why="built without prepare")
"""The plan of a loader that the user has constructed."""


def data_groups(mesh: Any, num_processes: int, process_index: int) -> tuple[int, int]:
    """Count the data-parallel groups and find the one of this process.

    Args:
        mesh: The `DeviceMesh` of the run, or None. Ranks along a tensor, context, sequence or pipeline axis
            share their batches.
        num_processes: Number of processes; where it differs from the mesh's size, groups are already counted.

    Returns:
        Number of groups and index of this process' group.
    """
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
    *,
    num_processes: int,
    groups: int,
    group: int,
    split: bool,
    even: bool,
    dispatch: bool | None,
    put_on_device: bool,
    own_share: str | None = None,
) -> ShardPlan:
    """Decide how the batches of a loader are shared.

    Args:
        dispatch: Read on process 0 only; None decides by the kind of dataset.
        own_share: Why the dataset's own share is read, where it is.

    Raises:
        ConfigurationError: A batch size that cannot be split, or dispatching without device placement.
    """
    iterable = isinstance(loader.dataset, IterableDataset)
    if dispatch and not put_on_device:
        raise ConfigurationError(
            "dispatch_batches=True: batches are sent from device to device, and device placement is off. "
            "Leave device placement on, or dispatch_batches off."
        )
    size = nominal_batch_size(loader)
    if split and size is not None and size % groups:
        raise wrong_value(
            "batch_size",
            size,
            f"with split_batches each batch is cut into {groups} equal parts",
            f"Take a multiple of {groups}, or leave split_batches off",
        )
    part = size // groups if split and size is not None else size
    if groups > 1 and not dispatch and is_sharded(loader, groups, group):
        return ShardPlan("shard", groups, group, part, split, why="the dataset is sharded already")
    if own_share is not None:
        return ShardPlan("dataset_shards", groups, group, part, split, why=own_share)
    if num_processes > 1 and (dispatch or (dispatch is None and iterable and put_on_device)):
        why = "asked for" if dispatch else _WHY_DISPATCH
        return ShardPlan("dispatch", groups, group, part, split, why=why)
    if groups == 1:
        why = "one process" if num_processes == 1 else "all processes share each batch"
        return ShardPlan("leave", batch_size=size, split=split, even=even, why=why)
    why = "each process iterates the whole dataset" if iterable else "by the batch sampler"
    return ShardPlan("shard", groups, group, part, split, even or iterable, why)
