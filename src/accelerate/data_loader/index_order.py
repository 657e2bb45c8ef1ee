"""Samplers that `prepare_data_loader` makes from those of the user, which do not change.

The index sampler of a loader is its batch sampler or, without one, its sampler.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate import torch_private
from accelerate.data_loader.base import sampler_under
from accelerate.data_loader.constant_batches import ConstantBatchShard
from accelerate.data_loader.permutation import ConstantMemorySampler, SeedableRandomSampler
from accelerate.data_loader.plan import ShardPlan
from accelerate.data_loader.samplers import BatchSamplerShard, SamplerShard
from accelerate.ops import current_transport


def order_arguments(loader: DataLoader[Any], index_sampler: Any, plan: ShardPlan) -> dict[str, Any]:
    """Returns the arguments of a torch loader that set its order, of which some exclude others."""
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size if plan.mode == "dispatch" else plan.batch_size
        return {"batch_size": size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": index_sampler}
    return {"batch_sampler": index_sampler}


def seed_order(
    loader: DataLoader[Any],
    num_processes: int,
    data_seed: int | None,
    *,
    use_seedable: bool,
    use_constant_memory: bool,
) -> Any:
    """Returns the index sampler of a loader, whose random order may become a function of seed and epoch.

    The seed is that of the generator of the user, if there is one.
    """
    index_sampler: Any = loader._index_sampler
    sampler = sampler_under(index_sampler, loader)
    kind: type[SeedableRandomSampler]
    if use_constant_memory and type(sampler) is RandomSampler:
        kind = ConstantMemorySampler
    elif use_seedable and isinstance(sampler, RandomSampler):
        kind = SeedableRandomSampler
    else:
        return index_sampler
    if data_seed is None:
        generator: Any = sampler.generator
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        data_seed = _broadcast_seed(seed, num_processes)
    seedable = kind(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=torch_private.requested_samples(sampler),
        data_seed=data_seed,
    )
    return _with_sampler(index_sampler, seedable, sampler)


def shard_order(
    loader: DataLoader[Any], index_sampler: Any, plan: ShardPlan, num_processes: int
) -> tuple[Any, torch.Generator | None]:
    """Returns the shard of one group of an index sampler, and the generator to synchronize over all ranks."""
    generator = None
    if plan.mode == "already_sharded":
        index_sampler = _resize_batches(index_sampler, plan.batch_size)
    elif num_processes > 1 or plan.global_batch_size is not None:  # the order is that of any number
        index_sampler, generator = synchronize_order(loader, index_sampler, num_processes)
    groups, group, even = plan.groups, plan.group, plan.even
    if plan.global_batch_size is not None:
        shard = ConstantBatchShard(index_sampler, groups, group, global_batch_size=plan.global_batch_size)
        return shard, generator
    if plan.mode == "unsharded":
        return index_sampler, generator
    if loader.batch_sampler is None and not isinstance(index_sampler, BatchSampler):
        return SamplerShard(index_sampler, groups, group, even), generator
    return BatchSamplerShard(index_sampler, groups, group, plan.split, even), generator


def _resize_batches(index_sampler: Any, size: int | None) -> Any:
    """Returns torch's batch sampler with another batch size, which `split_batches` divides."""
    if type(index_sampler) is not BatchSampler or size == index_sampler.batch_size:
        return index_sampler
    resized: Any = copy(index_sampler)
    resized.batch_size = size
    return resized


def synchronize_order(
    loader: DataLoader[Any], index_sampler: Any, num_processes: int
) -> tuple[Any, torch.Generator | None]:
    """Gives a random sampler without a generator one that has the same seed on all processes."""
    sampler = sampler_under(index_sampler, loader)
    if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
        return index_sampler, None
    if sampler.generator is None:
        drawn = int(torch.empty((), dtype=torch.int64).random_().item())
        seeded = copy(sampler)
        seeded.generator = torch.Generator().manual_seed(_broadcast_seed(drawn, num_processes))
        index_sampler = _with_sampler(index_sampler, seeded, sampler)
        sampler = seeded
    return index_sampler, sampler.generator


def _broadcast_seed(seed: int, num_processes: int) -> int:
    return seed if num_processes == 1 else int(current_transport().broadcast_object(seed, 0))


def _with_sampler(index_sampler: Any, sampler: Any, old: Any) -> Any:
    """Returns a copy of an index sampler in which a sampler replaces another one."""
    if index_sampler is old:
        return sampler
    changed = copy(index_sampler)
    if (inner := getattr(changed, "batch_sampler", None)) is not None:
        changed.batch_sampler = _with_sampler(inner, sampler, old)
    else:
        changed.sampler = sampler
    return changed
