"""Copies of a prepared loader that start in the middle of an epoch.

`skip_first_batches` skips batches of the same run. A loader that resumes by itself from a checkpoint, perhaps
of a run with another number of processes or another batch size, reads through the copy of
`make_resumed_loader`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate.base import CheckpointError
from accelerate.data_loader.iterable_shard import IterableDatasetShard, ReadSegment
from accelerate.data_loader.plan import UNPREPARED
from accelerate.data_loader.position import Position, Restored
from accelerate.data_loader.samplers import BatchSamplerShard, SamplerShard, SkipBatchSampler


def make_resumed_loader(loader: Any) -> Any:
    """Returns the late start with which a loader resumes by itself, or None if it begins an epoch."""
    restored: Restored | None = loader.tracker.restored
    if restored is None or not restored.position.seen or loader.start.origin is not None:
        return None
    if not loader.use_stateful_dataloader or restored.by_torchdata:
        if restored.position.is_over and not loader.skip_batches:
            _begin_next_epoch(loader, restored)
        return None
    return skip_prepared(loader, restored.position.seen)


def _begin_next_epoch(loader: Any, restored: Restored) -> None:
    """Ends the epoch of a checkpoint after its last batch, because the loop does not skip its batches."""
    loader.tracker.end_resumed(restored.position, loader)
    loader._advance(restored.position.epoch)
    position = Position(epoch=loader.iteration, stream=restored.position.stream)
    loader.tracker.restored = replace(restored, position=position)


def skip_prepared(loader: Any, skipped: int) -> Any:
    """Returns a copy of a prepared loader that skips batches at the start of each pass.

    After a checkpoint was loaded, and if as many batches are skipped as the loop had taken by then, the copy
    starts after the samples that all processes of that run had taken, also if that run had another number of
    processes or another batch size.
    """
    restored: Restored | None = loader.tracker.restored
    if restored is None or skipped != restored.position.seen:
        return _skip_steps(loader, skipped)
    position = restored.position
    if position.is_over and isinstance(loader.dataset, IterableDataset):
        return _copy_with_start(loader, position)
    _refuse_other_shards(loader, restored)
    if position.stream is not None:  # the dataset itself starts there
        return _copy_with_start(loader, position._replace(is_over=False))
    _refuse_other_workers(loader, restored)
    used = _used_segments(loader, restored)
    if not used:
        return _skip_steps(loader, skipped)
    rows = loader.plan.rows_in_batch or restored.plan.rows_in_batch or 1
    steps, samples = sum(segment.steps for segment in used), sum(segment.samples for segment in used)
    late = _shard_rest(loader, Position(seen=steps, consumed=samples // rows, used=used))
    if steps < skipped:
        late = _skip_steps(late, skipped - steps)
        late.start = replace(late.start, origin=loader)
    return late


def _used_segments(loader: Any, restored: Restored) -> tuple[ReadSegment, ...]:
    """Returns the segments of the epoch that were read with other groups or batch sizes."""
    position, before, now = restored.position, restored.plan, loader.plan
    is_same = (before.groups, before.global_batch_size) == (now.groups, now.global_batch_size)
    if _consumed_in_batches_of(loader, restored) == position.consumed and is_same:
        return position.used
    if not position.ends_step:
        raise CheckpointError(
            f"{loader!r} cannot continue in the middle of this epoch: the checkpoint was saved between two "
            "micro-batches of a step, whose rest cannot be divided by another number of processes or another "
            "global_batch_size. Save where accelerator.sync_gradients is True."
        )
    rows = before.rows_in_batch or now.rows_in_batch or 1
    steps = position.seen - sum(segment.steps for segment in position.used)
    samples = position.consumed * rows - sum(segment.samples for segment in position.used)
    # If one rank reads for all, a step has a batch for each group, and its workers yield single batches.
    parts = samples // rows if before.mode == "dispatch" else steps
    return (*position.used, ReadSegment(steps, samples, parts)) if steps else position.used


def _refuse_other_workers(loader: Any, restored: Restored) -> None:
    """Raises an error if the number of workers of an iterable dataset has changed, which yield in turn."""
    before, now = restored.state.get("num_workers"), loader.num_workers
    if before is None or max(before, 1) == max(now, 1) or not isinstance(loader.dataset, IterableDataset):
        return
    raise CheckpointError(
        f"{loader!r} cannot continue in the middle of this epoch: num_workers was {before} and is {now} now, "
        f"which changes the order of the samples of an iterable dataset. Set it to {before} until the end of "
        "the epoch, or continue from a checkpoint between two epochs."
    )


def _refuse_other_shards(loader: Any, restored: Restored) -> None:
    """Raises an error if groups read shards of their own, and their number has changed."""
    before, now = restored.plan, loader.plan
    if (before.has_own_shards, before.groups) == (now.has_own_shards, now.groups):
        return
    if not (now.has_own_shards or before.has_own_shards):
        return
    read = "its own shards" if before.has_own_shards else "batches of the whole"
    raise CheckpointError(
        f"{loader!r} cannot continue in the middle of this epoch: {before.groups} data-parallel groups have "
        f"read {read}, and the rest of the dataset cannot be sharded over {now.groups} groups. Continue with "
        f"{before.groups} until the end of the epoch, or from a checkpoint between two epochs. Loaders with "
        "dispatch_batches=True can continue with any number."
    )


def _consumed_in_batches_of(loader: Any, restored: Restored) -> int:
    """Returns the number of consumed batches of a checkpoint, counted in the batches of this loader."""
    position, before = restored.position, restored.plan.rows_in_batch
    now: int | None = loader.plan.rows_in_batch
    if before is None or now is None or before == now or position.is_over:
        return position.consumed
    samples = position.consumed * before
    if samples % now or loader.plan.has_own_shards:
        reason = f"no batch of {now} begins after them"
        if loader.plan.has_own_shards:
            reason = "the batches of shards that the dataset makes are counted, not its samples"
        raise CheckpointError(
            f"{loader!r} cannot continue in the middle of this epoch: {samples} of its samples were read in "
            f"batches of {before} and not of {now}, and {reason}. Continue with batches of {before} until "
            "the end of the epoch, or from a checkpoint between two epochs."
        )
    return samples // now


def _skip_steps(loader: Any, skipped: int) -> Any:
    """Returns a copy that starts at a later step, in which steps keep their numbers and their padding."""
    before: Position = loader.start.position
    seen, consumed = before.seen + skipped, before.consumed + loader.batches_before(skipped)
    position = before._replace(seen=seen, consumed=consumed, stream=None)
    late = _copy_with_start(loader, position, keeps_padding_source=seen > 0)
    is_dispatched = loader.plan.mode == "dispatch"
    if isinstance(loader.dataset, IterableDataset):
        late.skip_batches += skipped
    else:
        # The torch loader of a dispatched loader reads the batches of all groups.
        skipped_by_index = skipped * (loader.plan.batches_per_step if is_dispatched else 1)
        late.base_dataloader = reorder(
            loader.base_dataloader,
            partial(SkipBatchSampler, skip_batches=skipped_by_index, kept=loader.num_padding_batches),
        )
    epoch = getattr(loader.get_sampler(), "epoch", None)
    is_unprepared_dispatcher = is_dispatched and loader.plan.reason == UNPREPARED.reason
    is_unprepared_shard = loader.plan == UNPREPARED and isinstance(loader.batch_sampler, BatchSamplerShard)
    if (is_unprepared_dispatcher or is_unprepared_shard) and isinstance(epoch, int):
        late.iteration = epoch
    return late


def _shard_rest(loader: Any, position: Position) -> Any:
    """Returns a copy that shards the rest of an epoch whose beginning was read by other groups."""
    dataset, base = loader.dataset, loader.base_dataloader
    late = _copy_with_start(loader, position)
    shard = copy(dataset) if isinstance(dataset, IterableDatasetShard) else None
    if shard is None and isinstance(dataset, IterableDataset) and loader.plan.mode == "unsharded":
        # Each worker skips what it has read, which differs from the batches that one process would read.
        shard = IterableDatasetShard(dataset, base.batch_size or 1, bool(base.drop_last), even_batches=False)
    if shard is not None:
        shard.used = position.used
        late.base_dataloader = copy_with(base, dataset=shard)
    elif isinstance(dataset, IterableDataset):
        late.start = replace(late.start, skip_source=position.consumed)
    else:
        late.base_dataloader = reorder(base, partial(_skip_in_source, consumed=position.consumed))
    return late


def skip_before_sharding(loader: Any, num_batches: int) -> Any:
    """Returns a copy of a prepared map-style loader that skips batches of the dataset before sharding."""
    return _shard_rest(loader, Position(consumed=num_batches)) if num_batches else loader


def _skip_in_source(index_sampler: Any, consumed: int) -> Any:
    """Returns the sampler of a prepared loader that skips batches before they are sharded."""
    if isinstance(index_sampler, SamplerShard):
        items = copy(index_sampler)
        items.shard = _skip_in_source(index_sampler.shard, consumed)
        return items
    if isinstance(index_sampler, BatchSamplerShard):
        shard = copy(index_sampler)
        shard.batch_sampler = SkipBatchSampler(index_sampler.batch_sampler, consumed)
        return shard
    return SkipBatchSampler(index_sampler, consumed)


def _copy_with_start(loader: Any, position: Position, **start: Any) -> Any:
    """Returns a late start of a loader, with the same tracker."""
    late = copy(loader)
    late.start = replace(loader.start, position=position, origin=loader, **start)
    return late


def reorder(loader: DataLoader[Any], change: Callable[[Any], Any]) -> DataLoader[Any]:
    """Returns a copy of a torch loader with a changed sampler or batch sampler."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return copy_with(loader, **{name: change(getattr(loader, name))})


def copy_with(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Returns a copy of a torch loader without its iterator, with other attributes, also read-only ones."""
    changed = copy(loader)
    for name, value in {"_iterator": None, **attributes}.items():
        object.__setattr__(changed, name, value)
    return changed
