"""Makes a prepared loader from a torch `DataLoader`.

`Accelerator.prepare` calls `prepare_data_loader`, which plans which rank reads which batch, and builds a
`DataLoaderShard` or a `DataLoaderDispatcher` by the plan.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accelerate import torch_private
from accelerate.base import PreparationError
from accelerate.data_loader.base import DataLoaderAdapter, kept_settings, sampler_under
from accelerate.data_loader.constant_batches import ConstantBatchShard, has_constant_batches
from accelerate.data_loader.dispatcher import DataLoaderDispatcher
from accelerate.data_loader.existing_shards import find_native_shard, find_user_shard
from accelerate.data_loader.iterable_shard import IterableDatasetShard, with_state
from accelerate.data_loader.last_batch import PaddingSource, length_of
from accelerate.data_loader.loaders import DataLoaderShard, wrapper_for_xla
from accelerate.data_loader.permutation import ConstantMemorySampler, SeedableRandomSampler
from accelerate.data_loader.plan import ShardPlan, data_groups, is_sharded, plan
from accelerate.data_loader.rank_aware import (
    OrderCheck,
    SamplerJoin,
    check_settings,
    padding_of,
    pads_like_torch,
)
from accelerate.data_loader.samplers import BatchSamplerShard, SamplerShard, shard_of
from accelerate.data_loader.stream_check import StreamCheck
from accelerate.devices import of_device
from accelerate.ops import Transport, current_transport, reachable_transport
from accelerate.state import PartialState

Loader = TypeVar("Loader", bound=DataLoader[Any])


def get_sampler(dataloader: Any) -> Any:
    """Returns the sampler that orders the indices of a loader, or None.

    Args:
        dataloader: A prepared loader, or a torch loader.
    """
    return sampler_under(dataloader._index_sampler, dataloader)


def prepare_data_loader(
    dataloader: Loader,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    use_constant_memory_sampler: bool = False,
    already_sharded: bool | None = None,
    global_batch_size: int | None = None,
) -> Loader:
    """Returns a loader that yields the shard of each process, on its device.

    Called on all ranks.

    Args:
        dataloader: The torch loader; its workers, collate function, pinning and other settings are kept.
        device: Device of the batches. Default: the device of this process.
        num_processes: Number of processes that shard the data. Default: those of the run.
        process_index: Index of this process. Default: its index in the run.
        split_batches: Whether the batch of the loader is the global batch, which is split. Otherwise each
            process gets whole batches.
        put_on_device: Whether to move batches to the device.
        rng_types: Generators to synchronize at each pass, see `DataLoaderShard`.
        dispatch_batches: Whether only rank 0 reads. The loader is then a `DataLoaderDispatcher`, also on one
            process. None: it does on several processes, for iterable datasets that are put on the device and
            do not shard themselves. False: each process iterates the whole dataset and keeps its shard, or
            reads its own shards if the number of shards is a multiple of the number of processes.
        even_batches: Whether to pad the end of the epoch from its beginning, so that all processes get equal
            batches. False applies to map-style loaders that are sharded; dispatched loaders and iterable
            datasets are always padded.
        slice_fn_for_dispatch: Function that cuts one part of a dispatched batch, see `DataLoaderDispatcher`.
        use_seedable_sampler: Whether to shuffle with a `SeedableRandomSampler`.
        data_seed: Seed of that sampler. Default: the seed that torch was last given, on rank 0.
        non_blocking: Whether not to wait for copies from pinned memory.
        use_stateful_dataloader: Whether the loader resumes by itself, see `DataLoaderAdapter`.
        torch_device_mesh: The `DeviceMesh` of the run. Ranks that differ along tensor, context, sequence or
            pipeline dimensions only get the same batches.
        use_constant_memory_sampler: Whether to shuffle with a `ConstantMemorySampler` if torch's
            `RandomSampler` does so; seeded as with `use_seedable_sampler`, which it includes.
        already_sharded: Whether the loader of each process already yields the shard of its rank: True keeps
            it as it is, False shards it. None keeps it if `num_replicas` and `rank` of a sampler, a batch
            sampler or an iterable dataset are those of this process, see `rank_aware.ATTRIBUTES`.
        global_batch_size: Number of samples of one optimizer step on all processes together. Loaders with
            torch's batch sampler, whose batch size divides it, yield micro-batches of at most their batch
            size, `global_batch_size` samples in each step. None: each process gets whole batches.

    Returns:
        A `DataLoaderShard` or a `DataLoaderDispatcher`, which are instances of `torch.utils.data.DataLoader`.
        On an XLA device, the first one is inside an `MpDeviceLoaderWrapper`.

    Raises:
        PreparationError: If the loader is a prepared one, or of a class that overrides `__iter__`.
        ConfigurationError: If settings contradict each other, see `plan`; if `use_constant_memory_sampler` is
            set for a sampler with replacement; if `num_replicas` and `rank` are not those of this process.
    """
    if isinstance(dataloader, DataLoaderAdapter):
        raise PreparationError(
            f"{dataloader!r} is prepared already: sharding it again would lose data. "
            "Prepare the loader it was made from."
        )
    _refuse_own_iteration(dataloader)
    num_processes = PartialState().num_processes if num_processes is None else num_processes
    process_index = PartialState().process_index if process_index is None else process_index
    target = (device or PartialState().device) if put_on_device else None
    is_xla = target is not None and of_device(torch.device(target)).own_runtime
    decided, native_shard = _decide(
        dataloader,
        num_processes,
        data_groups(torch_device_mesh, num_processes, process_index),
        already_sharded,
        split=split_batches,
        even=even_batches,
        dispatch=dispatch_batches,
        put_on_device=put_on_device,
        is_xla=is_xla,
    )
    sampler_kinds = {"use_seedable": use_seedable_sampler, "use_constant_memory": use_constant_memory_sampler}
    index_sampler = seed_order(dataloader, num_processes, data_seed, **sampler_kinds)
    is_sharded_here = decided.mode in ("shard", "unsharded") and not split_batches
    if global_batch_size and is_sharded_here and has_constant_batches(index_sampler, global_batch_size):
        decided = replace(decided, global_batch_size=global_batch_size)
    settings: dict[str, Any] = {
        "_plan": decided,
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": dataloader.drop_last or bool(getattr(index_sampler, "drop_last", False)),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        **kept_settings(dataloader),
    }
    loader: Any
    if decided.uses_dispatcher:
        settings |= {"slice_fn": slice_fn_for_dispatch, "split_batches": split_batches}
        settings |= order_arguments(dataloader, index_sampler, decided)
        loader = DataLoaderDispatcher(dataloader.dataset, **settings)
    else:
        dataset, index_sampler, generator = _shard(
            dataloader, native_shard, index_sampler, decided, num_processes
        )
        if num_processes > 1 and not is_xla:
            _connect_ranks(dataset, index_sampler, dataloader, decided, num_processes, already_sharded)
        settings |= {"device": None if is_xla else target, "synchronized_generator": generator}
        settings["rng_types"] = rng_types if num_processes > 1 else None
        settings |= order_arguments(dataloader, index_sampler, decided)
        loader = DataLoaderShard(dataset, **settings)
        if is_xla:  # torch_xla's own loader moves batches
            loader = wrapper_for_xla()(loader, target)
    return loader  # type: ignore[no-any-return]


def _refuse_own_iteration(loader: DataLoader[Any]) -> None:
    """Raises an error for a subclass of torch's loader that changes its batches or their number."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__iter__.__module__.startswith("torchdata."):
        raise PreparationError(
            f"{kind.__name__} overrides __iter__ of DataLoader. A prepared loader reads the dataset, the "
            "sampler and the collate function, so it would yield other batches. Change batches in collate_fn "
            "or in the loop, or iterate over the loader without prepare."
        )


def _decide(
    loader: DataLoader[Any],
    num_processes: int,
    groups: tuple[int, int],
    already_sharded: bool | None,
    *,
    split: bool,
    even: bool,
    dispatch: bool | None,
    put_on_device: bool,
    is_xla: bool,
) -> tuple[ShardPlan, Any]:
    """Returns the plan of a loader, and the shard that its dataset makes or None.

    Called on all ranks.
    """
    is_plain = not already_sharded and _has_plain_order(loader)
    user_shard = None if is_plain else find_user_shard(loader, num_processes, groups, already_sharded)
    if user_shard is not None:
        check_settings(loader, user_shard, split=split, dispatch=dispatch)
    native_shard = None
    if not is_xla and not is_plain:
        is_checked = already_sharded is None
        native_shard = find_native_shard(
            loader, num_processes, groups, dispatch, user_shard, is_checked=is_checked
        )
    decided = plan(
        loader,
        num_processes,
        *groups,
        split=split,
        even=even,
        dispatch=dispatch,
        put_on_device=put_on_device,
        native_shard=None if native_shard is None else native_shard.reason,
        already_sharded=user_shard,
    )
    return decided, None if native_shard is None else native_shard.dataset


def _has_plain_order(loader: DataLoader[Any]) -> bool:
    """Returns whether samplers of torch that do not depend on ranks order a map-style dataset."""
    batch_sampler = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(batch_sampler) is not BatchSampler:
        return False
    return type(batch_sampler.sampler) in (SequentialSampler, RandomSampler)


def _shard(
    loader: DataLoader[Any], native_shard: Any, index_sampler: Any, decided: ShardPlan, num_processes: int
) -> tuple[Any, Any, torch.Generator | None]:
    """Returns the dataset and the index sampler of one group, and the generator to synchronize."""
    dataset = loader.dataset
    if native_shard is not None:
        return native_shard, index_sampler, None
    if isinstance(dataset, IterableDataset):
        return _shard_iterable(loader, decided) if decided.mode == "shard" else dataset, index_sampler, None
    return dataset, *shard_order(loader, index_sampler, decided, num_processes)


def _shard_iterable(loader: DataLoader[Any], decided: ShardPlan) -> IterableDatasetShard:
    if is_sharded(loader, decided.groups, decided.group):
        own: IterableDatasetShard = copy(loader.dataset)  # type: ignore[assignment]
        own.attaches_counts = own.part_size == loader.batch_size  # otherwise its batches are not the loader's
        own.padding_source = PaddingSource()
        return with_state(own)
    shard = IterableDatasetShard(
        loader.dataset,
        batch_size=decided.batch_size or 1,
        drop_last=loader.drop_last,
        num_processes=decided.groups,
        process_index=decided.group,
    )
    shard.attaches_counts = True
    return with_state(shard)


def _connect_ranks(
    dataset: Any,
    index_sampler: Any,
    loader: DataLoader[Any],
    decided: ShardPlan,
    num_processes: int,
    already_sharded: bool | None,
) -> None:
    """Connects the ranks that end together, or whose orders or samples are compared.

    Called on all ranks.
    """
    transport = reachable_transport(num_processes)
    shard = shard_of(index_sampler)
    if shard is not None:
        batches = shard.shard if isinstance(shard, SamplerShard) else shard
        batches.already_sharded = decided.mode == "already_sharded"
        if batches.already_sharded and transport is not None:
            _join_ranks(batches, loader, decided, transport)
        elif already_sharded is None and transport is not None:
            is_torch = type(batches.batch_sampler) is BatchSampler
            sampler = batches.sampler if is_torch else batches.batch_sampler
            is_known = isinstance(sampler, SequentialSampler) or hasattr(sampler, "generator")
            batches.order_check = OrderCheck(transport, type(sampler).__name__, once=is_known)
    elif transport is not None and already_sharded is None and _is_checked_stream(dataset, loader):
        dataset.stream_check = StreamCheck(transport, type(dataset.dataset).__name__)


def _is_checked_stream(dataset: object, loader: DataLoader[Any]) -> bool:
    """Returns whether the processes of the ranks read the dataset of the user, and may compare it."""
    is_shard = isinstance(dataset, IterableDatasetShard) and dataset.dataset is loader.dataset
    return is_shard and not loader.num_workers


def _join_ranks(
    batches: BatchSamplerShard, loader: DataLoader[Any], decided: ShardPlan, transport: Transport
) -> None:
    """Connects ranks that read shards of their own, so that they end together."""
    batches.join = SamplerJoin(transport, decided.group, batches.drop_last, padding_of(loader))
    if pads_like_torch(batches.batch_sampler):
        return
    own = length_of(batches.batch_sampler)
    lengths = transport.gather_object(own)
    if None not in lengths:
        batches.extra_batches = (min if batches.drop_last else max)(lengths) - (own or 0)


# Samplers made from those of the user, which do not change


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
    # Subclasses may have an order of their own.
    has_order_of_torch = getattr(type(sampler), "__iter__", None) is RandomSampler.__iter__
    kind: type[SeedableRandomSampler]
    if use_constant_memory and type(sampler) is RandomSampler:
        kind = ConstantMemorySampler
    elif use_seedable and has_order_of_torch:
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
    """Gives a random sampler the seed of rank 0, and one without a generator a generator with this seed."""
    sampler = sampler_under(index_sampler, loader)
    if isinstance(sampler, SeedableRandomSampler):
        return _with_seed(index_sampler, sampler, num_processes), None
    if not hasattr(sampler, "generator"):
        return index_sampler, None
    if sampler.generator is None:
        drawn = int(torch.empty((), dtype=torch.int64).random_().item())
        seeded = copy(sampler)
        seeded.generator = torch.Generator().manual_seed(_broadcast_seed(drawn, num_processes))
        index_sampler = _with_sampler(index_sampler, seeded, sampler)
        sampler = seeded
    return index_sampler, sampler.generator


def _with_seed(index_sampler: object, sampler: SeedableRandomSampler, num_processes: int) -> Any:
    """Returns an index sampler whose sampler has the seed of rank 0."""
    seed = _broadcast_seed(sampler.initial_seed, num_processes)
    if seed == sampler.initial_seed:
        return index_sampler
    seeded = copy(sampler)
    seeded.initial_seed = seed
    return _with_sampler(index_sampler, seeded, sampler)


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
