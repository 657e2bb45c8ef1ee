"""A user's DataLoader becomes a prepared one, as its plan says."""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate.base import PreparationError
from accelerate.data_loader.base import DataLoaderAdapter, kept_settings, sampler_under
from accelerate.data_loader.dispatch import DataLoaderDispatcher
from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.native_sharding import OwnShare, is_the_same_everywhere, own_share
from accelerate.data_loader.plan import ShardPlan, data_groups, is_shared_out, may_read_own_share, plan
from accelerate.data_loader.samplers import BatchSamplerShard, SamplerShard, SeedableRandomSampler
from accelerate.data_loader.shard import DataLoaderShard, wrapper_for_xla
from accelerate.devices import of_device
from accelerate.ops import current_transport
from accelerate.state import PartialState

Loader = TypeVar("Loader", bound=DataLoader[Any])


def get_sampler(dataloader: Any) -> Any:
    """The sampler that orders a loader's indices; None where it has none.

    Args:
        dataloader: A prepared or a plain loader.
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
) -> Loader:
    """Make a loader that gives each process its share, on its device; called on all ranks.

    Args:
        dataloader: The loader; its workers, collate function, pinning and so on are kept.
        device: Where batches go; None: the device of this process.
        num_processes: How many processes share the data; None: those of the run.
        process_index: Which of them this is; None: as in the run.
        split_batches: The loader's batch is the global one and is cut; otherwise each process gets whole
            batches.
        put_on_device: Move batches to the device.
        rng_types: Generators to bring together at each pass, see `DataLoaderShard`.
        dispatch_batches: Read on process 0 only; None: for iterable datasets that are put on the device.
        even_batches: Fill the short end from the beginning, so that all processes get equal batches. False
            concerns map-style loaders that are shared out; dispatched loaders and iterable datasets are
            always filled.
        slice_fn_for_dispatch: Cuts one part of a dispatched batch, see `DataLoaderDispatcher`.
        use_seedable_sampler: Shuffle by `SeedableRandomSampler`.
        data_seed: Its seed; None: the seed that torch was last given, on process 0.
        non_blocking: Don't wait for copies from pinned memory.
        use_stateful_dataloader: Go on by itself, see `DataLoaderAdapter`.
        torch_device_mesh: The `DeviceMesh` of the run: ranks that differ along tensor, context, sequence or
            pipeline axes only get the same batches.

    Returns:
        A `DataLoaderShard` or a `DataLoaderDispatcher`, both `torch.utils.data.DataLoader`s; on an XLA device
        the first one inside an `MpDeviceLoaderWrapper`.

    Raises:
        PreparationError: The loader is a prepared one.
        ConfigurationError: Settings that contradict each other, see `plan`.
    """
    if isinstance(dataloader, DataLoaderAdapter):
        raise PreparationError(
            f"{dataloader!r} is prepared already: sharing it out again would lose data. "
            "Prepare the loader it was made from."
        )
    if num_processes is None:
        num_processes = PartialState().num_processes
    if process_index is None:
        process_index = PartialState().process_index
    groups, group = data_groups(torch_device_mesh, num_processes, process_index)
    target = (device or PartialState().device) if put_on_device else None
    share = None
    if groups > 1 and isinstance(dataloader.dataset, IterableDataset) and not _is_xla(target):
        share = _own_share(dataloader, num_processes, groups, group, dispatch_batches)
    decided = plan(
        dataloader,
        num_processes=num_processes,
        groups=groups,
        group=group,
        split=split_batches,
        even=even_batches,
        dispatch=dispatch_batches,
        put_on_device=put_on_device,
        own_share=None if share is None else share.why,
    )
    index_sampler, sampler = dataloader._index_sampler, get_sampler(dataloader)
    if use_seedable_sampler and isinstance(sampler, RandomSampler):
        index_sampler = _with_sampler(index_sampler, _seedable(sampler, data_seed, num_processes), sampler)
    shared: dict[str, Any] = {
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": dataloader.drop_last or bool(getattr(index_sampler, "drop_last", False)),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        **kept_settings(dataloader),
    }
    if decided.how == "dispatch":
        indices = _index_arguments(dataloader, index_sampler, decided)
        cut = slice_fn_for_dispatch
        loader: Any = DataLoaderDispatcher(
            dataloader.dataset, split_batches, slice_fn=cut, **indices, **shared
        )
    else:
        dataset, index_sampler, generator = _shared_out(dataloader, index_sampler, decided, num_processes)
        dataset = dataset if share is None else share.dataset
        loader = DataLoaderShard(
            dataset,
            device=target,
            rng_types=rng_types if num_processes > 1 else None,
            synchronized_generator=generator,
            **_index_arguments(dataloader, index_sampler, decided),
            **shared,
        )
    loader.plan = decided
    loader.shares_batches = num_processes > groups
    return _moved_in_background(loader) if _is_for_xla(loader) else loader  # type: ignore[no-any-return]


def _own_share(
    loader: DataLoader[Any],
    num_processes: int,
    groups: int,
    group: int,
    dispatch: bool | None,
) -> OwnShare | None:
    """The share that the dataset gives to this group, where that is to be read; called on all ranks."""
    share = own_share(loader.dataset, groups, group)
    if share is None or not may_read_own_share(loader, dispatch=dispatch, given=share.is_given):
        return None
    transport = current_transport()
    if transport.size != num_processes:  # processes that cannot be asked
        return None
    return share if share.is_given or is_the_same_everywhere(loader.dataset, transport) else None


def _is_xla(device: Any) -> bool:
    return device is not None and of_device(torch.device(device)).own_runtime


def _is_for_xla(loader: Any) -> bool:
    return _is_xla(loader.device if isinstance(loader, DataLoaderShard) else None)


def _moved_in_background(loader: DataLoaderShard) -> Any:
    """XLA devices: torch_xla's own loader uploads batches and marks the steps of the graph."""
    target, loader.device = loader.device, None
    return wrapper_for_xla()(loader, target)


def _shared_out(
    loader: DataLoader[Any], index_sampler: Any, decided: ShardPlan, num_processes: int
) -> tuple[Any, Any, torch.Generator | None]:
    """The share of one group: dataset, index sampler, and the generator that must be the same everywhere."""
    dataset, alone = loader.dataset, decided.how == "leave"
    if isinstance(dataset, IterableDataset):
        return (
            (_shard_of_iterable(loader, decided) if decided.how == "shard" else dataset),
            index_sampler,
            None,
        )
    generator = None
    if num_processes > 1:
        index_sampler, generator = _with_agreed_generator(loader, index_sampler)
    if alone:
        return dataset, index_sampler, generator
    groups, group, even = decided.groups, decided.group, decided.even
    if loader.batch_sampler is None and not isinstance(index_sampler, BatchSampler):
        return dataset, SamplerShard(index_sampler, groups, group, even), generator
    return dataset, BatchSamplerShard(index_sampler, groups, group, decided.split, even), generator


def _shard_of_iterable(loader: DataLoader[Any], decided: ShardPlan) -> IterableDatasetShard:
    if is_shared_out(loader, decided.groups, decided.group):
        return _users_shard(loader)
    shard = IterableDatasetShard(
        loader.dataset,
        batch_size=decided.batch_size or 1,
        drop_last=loader.drop_last,
        num_processes=decided.groups,
        process_index=decided.group,
    )
    shard.tagged = True
    return shard


def _users_shard(loader: DataLoader[Any]) -> IterableDatasetShard:
    """The dataset that the user has shared out; it tells of filler where the loader's batches are its own."""
    shard: IterableDatasetShard = copy(loader.dataset)  # type: ignore[assignment]
    shard.tagged = shard.part_size == loader.batch_size
    return shard


def _index_arguments(loader: DataLoader[Any], index_sampler: Any, decided: ShardPlan) -> dict[str, Any]:
    """Which of torch's arguments, of which some exclude others, say in what order the dataset is read."""
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size if decided.how == "dispatch" else decided.batch_size
        return {"batch_size": size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": index_sampler}
    return {"batch_sampler": index_sampler}


def _seedable(sampler: RandomSampler, data_seed: int | None, num_processes: int) -> SeedableRandomSampler:
    """The same shuffle as a function of seed and epoch; a generator that the user seeded gives the seed."""
    if data_seed is None:
        seed = torch.initial_seed() if sampler.generator is None else sampler.generator.initial_seed()
        data_seed = _agreed(seed, num_processes)
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        data_seed=data_seed,
    )


def _with_agreed_generator(loader: DataLoader[Any], index_sampler: Any) -> tuple[Any, torch.Generator | None]:
    """Give a random sampler without a generator one that starts alike on all processes."""
    sampler = sampler_under(index_sampler, loader)
    if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
        return index_sampler, None
    if sampler.generator is not None:
        return index_sampler, sampler.generator
    drawn = int(torch.empty((), dtype=torch.int64).random_().item())
    agreeing = copy(sampler)
    agreeing.generator = torch.Generator().manual_seed(_agreed(drawn, 2))
    return _with_sampler(index_sampler, agreeing, sampler), agreeing.generator


def _agreed(seed: int, num_processes: int) -> int:
    """Process 0's seed."""
    return seed if num_processes == 1 else int(current_transport().broadcast_object(seed, 0))


def _with_sampler(index_sampler: Any, sampler: Any, old: Any) -> Any:
    """A copy of a batch sampler over another sampler; the user's own objects stay as they are."""
    if index_sampler is old:
        return sampler
    changed = copy(index_sampler)
    if (inner := getattr(changed, "batch_sampler", None)) is not None:
        changed.batch_sampler = _with_sampler(inner, sampler, old)
    else:
        changed.sampler = sampler
    return changed
