"""Finds loaders that are sharded already, by their user or by their dataset.

`prepare_data_loader` calls both functions on all ranks before it makes the plan of a loader.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate.data_loader.native_sharding import (
    NativeShard,
    is_the_same_everywhere,
    may_read_native_shard,
    native_shard,
)
from accelerate.data_loader.plan import is_sharded
from accelerate.data_loader.rank_aware import check_settings, match_ranks
from accelerate.logging import get_logger
from accelerate.ops import reachable_transport

logger = get_logger(__name__)


def find_user_shard(
    loader: DataLoader[Any], num_processes: int, groups: tuple[int, int], already_sharded: bool | None
) -> str | None:
    """Returns the reason why a loader already yields the shard of its rank, or None.

    Called on all ranks.
    """
    if num_processes == 1 or already_sharded is False or is_sharded(loader, *groups):
        return None
    reason = "already_sharded=True"
    if already_sharded is None:
        matched = match_ranks(loader, *groups, reachable_transport(num_processes))
        if matched is None:
            return None
        reason = matched
        logger.info(f"Each rank reads its own shard of a loader that is already sharded {reason}.")
    return reason if groups[0] > 1 else None


def find_native_shard(
    loader: DataLoader[Any],
    num_processes: int,
    groups: tuple[int, int],
    dispatch: bool | None,
    user_shard: str | None,
    *,
    is_checked: bool,
) -> NativeShard | None:
    """Returns the shard that an iterable dataset makes for this group, or None if it is not to be read.

    Called on all ranks. With `is_checked`, settings that contradict a dataset that the user has sharded raise
    an error.
    """
    if groups[0] == 1 or not isinstance(loader.dataset, IterableDataset):
        return None
    if user_shard is not None:
        return NativeShard(loader.dataset, user_shard, True)
    shard = native_shard(loader.dataset, *groups)
    if shard is None:
        return None
    if shard.is_given and is_checked:
        check_settings(loader, shard.reason, split=False, dispatch=dispatch)
    if not may_read_native_shard(loader, groups[0], dispatch=dispatch, given=shard.is_given):
        return None
    transport = None if shard.is_given else reachable_transport(num_processes)
    return shard if transport is None or is_the_same_everywhere(loader.dataset, transport) else None
