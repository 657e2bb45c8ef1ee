"""Make a prepared loader from a user's `DataLoader`, as its plan says."""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate import torch_private
from accelerate.base import PreparationError
from accelerate.data_loader.base import DataLoaderAdapter, kept_settings, sampler_under
from accelerate.data_loader.last_batch import FirstRound, length_of
from accelerate.data_loader.loaders import DataLoaderDispatcher, DataLoaderShard, wrapper_for_xla
from accelerate.data_loader.permutation import ConstantMemorySampler, SeedableRandomSampler
from accelerate.data_loader.plan import (
    OwnShare,
    ShardPlan,
    data_groups,
    is_sharded,
    is_the_same_everywhere,
    may_read_own_share,
    own_share,
    plan,
)
from accelerate.data_loader.rank_aware import (
    BatchJoin,
    OrderCheck,
    check_settings,
    match_ranks,
    nested_samplers,
    padding_of,
    pads_like_torch,
)
from accelerate.data_loader.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SamplerShard,
    shard_of,
)
from accelerate.data_loader.stateful_shard import with_state
from accelerate.data_loader.stream_check import StreamCheck, is_of_library, match_streams
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.ops import Transport, current_transport
from accelerate.state import PartialState

logger = get_logger(__name__)

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
    use_constant_memory_sampler: bool = False,
    already_sharded: bool | None = None,
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
        rng_types: Generators to synchronize at each pass, see `DataLoaderShard`.
        dispatch_batches: Read on process 0 only. The loader is a `DataLoaderDispatcher`, also on one process.
            None: for iterable datasets that are put on the device and do not shard themselves, on several
            processes. False: each process iterates the whole dataset and keeps its share, or reads its own
            shards where the number of shards divides by that of the processes.
        even_batches: Fill the short end from the beginning, so that all processes get equal batches. False
            concerns map-style loaders that are sharded; dispatched loaders and iterable datasets are
            always filled.
        slice_fn_for_dispatch: Cuts one part of a dispatched batch, see `DataLoaderDispatcher`.
        use_seedable_sampler: Shuffle by `SeedableRandomSampler`.
        data_seed: Its seed; None: the seed that torch was last given, on process 0.
        non_blocking: Don't wait for copies from pinned memory.
        use_stateful_dataloader: Resume by itself, see `DataLoaderAdapter`.
        torch_device_mesh: The `DeviceMesh` of the run: ranks that differ along tensor, context, sequence or
            pipeline axes only get the same batches.
        use_constant_memory_sampler: Shuffle by `ConstantMemorySampler` where torch's `RandomSampler` does so;
            seeded as with `use_seedable_sampler`, which it includes.
        already_sharded: Whether the loader of each process already yields the shard of its rank: True keeps
            it as it is, False shards it. None keeps it where `num_replicas` and `rank` of a sampler, a batch
            sampler or an iterable dataset are those of this process, see `rank_aware.ATTRIBUTES`, and where
            an iterable dataset reads the rank in its code.

    Returns:
        A `DataLoaderShard` or a `DataLoaderDispatcher`, both `torch.utils.data.DataLoader`s; on an XLA device
        the first one inside an `MpDeviceLoaderWrapper`.

    Raises:
        PreparationError: The loader is a prepared one.
        ConfigurationError: Settings that contradict each other, see `plan`; `use_constant_memory_sampler`
            for a sampler with replacement; `num_replicas` and `rank` that are not those of this process.
    """
    if isinstance(dataloader, DataLoaderAdapter):
        raise PreparationError(
            f"{dataloader!r} is prepared already: sharding it again would lose data. "
            "Prepare the loader it was made from."
        )
    num_processes = PartialState().num_processes if num_processes is None else num_processes
    process_index = PartialState().process_index if process_index is None else process_index
    groups = data_groups(torch_device_mesh, num_processes, process_index)
    target = (device or PartialState().device) if put_on_device else None
    why = _find_shards_of_user(dataloader, num_processes, groups, already_sharded, dispatch_batches)
    if why is not None:
        check_settings(dataloader, why, split=split_batches, dispatch=dispatch_batches)
    share = None
    if not _is_xla(target):
        is_checked = already_sharded is None
        share = _own_share(dataloader, num_processes, groups, dispatch_batches, why, is_checked)
    decided = plan(
        dataloader,
        num_processes,
        *groups,
        split=split_batches,
        even=even_batches,
        dispatch=dispatch_batches,
        put_on_device=put_on_device,
        own_share=None if share is None else share.why,
        already_sharded=why,
    )
    order = _Order(dataloader, num_processes)
    if use_constant_memory_sampler and type(order.sampler) is RandomSampler:
        order.make_seedable(data_seed, ConstantMemorySampler)
    elif use_seedable_sampler and isinstance(order.sampler, RandomSampler):
        order.make_seedable(data_seed, SeedableRandomSampler)
    settings: dict[str, Any] = {
        # Of ranks that wait for each other, none can read on as torchdata does.
        "use_stateful_dataloader": use_stateful_dataloader and share is None,
        "_drop_last": dataloader.drop_last or bool(getattr(order.index_sampler, "drop_last", False)),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        **kept_settings(dataloader),
    }
    loader: Any
    if decided.how == "dispatch" or (num_processes == 1 and dispatch_batches):
        settings |= {"slice_fn": slice_fn_for_dispatch, "split_batches": split_batches}
        loader = DataLoaderDispatcher(dataloader.dataset, **order.arguments(decided), **settings)
    else:
        dataset = order.shard(decided) if share is None else share.dataset
        transport = None if num_processes == 1 or _is_xla(target) else _reachable(num_processes)
        if (shard := shard_of(order.index_sampler)) is not None:
            _connect_ranks(shard, dataloader, decided, transport, already_sharded)
        elif transport is not None and isinstance(dataset, IterableDatasetShard) and already_sharded is None:
            _check_stream(dataset, dataloader, transport)
        settings |= {"device": target, "rng_types": rng_types if num_processes > 1 else None}
        settings["synchronized_generator"] = order.generator
        loader = DataLoaderShard(dataset, **order.arguments(decided), **settings)
    loader.use_stateful_dataloader = use_stateful_dataloader
    loader.plan = decided
    if decided.how == "already_sharded" and not decided.even:
        loader.deals_ready_batches = not pads_like_torch(dataloader.batch_sampler)
    loader.shares_batches = num_processes > groups[0]
    if isinstance(loader, DataLoaderShard) and _is_xla(target):  # torch_xla's own loader uploads batches
        loader.device = None
        loader = wrapper_for_xla()(loader, target)
    return loader  # type: ignore[no-any-return]


def _find_shards_of_user(
    loader: DataLoader[Any],
    num_processes: int,
    groups: tuple[int, int],
    already_sharded: bool | None,
    dispatch: bool | None,
) -> str | None:
    """Return why the loader already yields the shard of its rank, else None; called on all ranks."""
    if num_processes == 1 or already_sharded is False or is_sharded(loader, *groups):
        return None
    why = "already_sharded=True"
    if already_sharded is None:
        transport = _reachable(num_processes)
        found = match_ranks(loader, *groups, transport)
        source = _unknown_source(loader, dispatch) if transport is not None and groups[0] > 1 else None
        if found is None and transport is not None and source is not None:
            found = match_streams(source, transport)
        if found is None:
            return None
        why = found
        logger.info(f"Each rank reads its own shard of a loader that is already sharded {why}.")
    return why if groups[0] > 1 else None


def _unknown_source(loader: DataLoader[Any], dispatch: bool | None) -> Any:
    """Returns the iterable dataset or sampler that may read the rank in its code, or None.

    Of samplers, those of dispatched loaders are returned only. The orders of others are compared during the
    first pass, see `OrderCheck`.
    """
    if isinstance(loader.dataset, IterableDataset):
        is_known = isinstance(loader.dataset, IterableDatasetShard) or is_of_library(loader.dataset)
        return None if is_known else loader.dataset
    samplers = nested_samplers(loader._index_sampler) if dispatch else ()
    return next((sampler for sampler in samplers if not is_of_library(sampler)), None)


def _reachable(num_processes: int) -> Transport | None:
    """The transport to the processes that share a loader; None where it does not connect them."""
    transport = current_transport()
    return transport if transport.size == num_processes else None


def _own_share(
    loader: DataLoader[Any],
    num_processes: int,
    groups: tuple[int, int],
    dispatch: bool | None,
    already_sharded: str | None,
    is_checked: bool,
) -> OwnShare | None:
    """The share that the dataset makes for this group, where that is to be read; called on all ranks."""
    if groups[0] == 1 or not isinstance(loader.dataset, IterableDataset):
        return None
    if already_sharded is not None:
        return OwnShare(loader.dataset, already_sharded, True)
    share = own_share(loader.dataset, *groups)
    if share is not None and share.is_given and is_checked:
        check_settings(loader, share.why, split=False, dispatch=dispatch)
    if share is None or not may_read_own_share(loader, groups[0], dispatch=dispatch, given=share.is_given):
        return None
    transport = None if share.is_given else _reachable(num_processes)
    return share if transport is None or is_the_same_everywhere(loader.dataset, transport) else None


def _connect_ranks(
    shard: BatchSamplerShard | SamplerShard,
    loader: DataLoader[Any],
    decided: ShardPlan,
    transport: Transport | None,
    already_sharded: bool | None,
) -> None:
    """Connect the ranks that end together, or whose orders are compared; called on all ranks."""
    batches = shard.shard if isinstance(shard, SamplerShard) else shard
    batches.already_sharded = decided.how == "already_sharded"
    if transport is None:
        return
    if not batches.already_sharded:
        if already_sharded is None:
            is_torch = type(batches.batch_sampler) is BatchSampler
            sampler = batches.sampler if is_torch else batches.batch_sampler
            batches.order_check = OrderCheck(transport, type(sampler).__name__)
        return
    batches.join = BatchJoin(transport, decided.group, batches.drop_last, padding_of(loader))
    if pads_like_torch(batches.batch_sampler):
        return
    own = length_of(batches.batch_sampler)
    lengths = transport.gather_object(own)
    if None not in lengths:
        batches.extra_batches = (min if batches.drop_last else max)(lengths) - (own or 0)


def _check_stream(shard: IterableDatasetShard, loader: DataLoader[Any], transport: Transport) -> None:
    """Compare the first samples of the ranks, where the main process reads them."""
    if shard.dataset is loader.dataset and not loader.num_workers:
        shard.stream_check = StreamCheck(transport, type(shard.dataset).__name__)


def _is_xla(device: Any) -> bool:
    return device is not None and of_device(torch.device(device)).own_runtime


class _Order:
    """By which indices a loader is read, and the generator of its sampler; the user's samplers stay."""

    def __init__(self, loader: DataLoader[Any], num_processes: int) -> None:
        self.loader = loader
        self.num_processes = num_processes
        self.index_sampler: Any = loader._index_sampler
        self.generator: torch.Generator | None = None

    def arguments(self, decided: ShardPlan) -> dict[str, Any]:
        """Which of torch's arguments, of which some exclude others, set the order."""
        loader = self.loader
        if isinstance(loader.dataset, IterableDataset):
            size = loader.batch_size if decided.how == "dispatch" else decided.batch_size
            return {"batch_size": size, "drop_last": loader.drop_last}
        if loader.batch_sampler is None:
            return {"batch_size": None, "sampler": self.index_sampler}
        return {"batch_sampler": self.index_sampler}

    @property
    def sampler(self) -> Any:
        """The sampler that orders the indices; None where there is none."""
        return sampler_under(self.index_sampler, self.loader)

    def make_seedable(self, data_seed: int | None, kind: type[SeedableRandomSampler]) -> None:
        """Make a random order a function of seed and epoch; the seed of the user's generator is kept."""
        sampler = self.sampler
        if data_seed is None:
            seed = torch.initial_seed() if sampler.generator is None else sampler.generator.initial_seed()
            data_seed = self._of_process_0(seed)
        seedable = kind(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=torch_private.requested_samples(sampler),
            data_seed=data_seed,
        )
        self.index_sampler = _with_sampler(self.index_sampler, seedable, sampler)

    def shard(self, decided: ShardPlan) -> Any:
        """Reduce the order to the shard of one group, and return the dataset to read."""
        loader, dataset = self.loader, self.loader.dataset
        if isinstance(dataset, IterableDataset):
            return _shard_of_iterable(loader, decided) if decided.how == "shard" else dataset
        if decided.how == "already_sharded":
            self._resize_batches(decided.batch_size)
        elif self.num_processes > 1:
            self._synchronize()
        if decided.how == "leave":
            return dataset
        groups, group, even = decided.groups, decided.group, decided.even
        if loader.batch_sampler is None and not isinstance(self.index_sampler, BatchSampler):
            self.index_sampler = SamplerShard(self.index_sampler, groups, group, even)
        else:
            self.index_sampler = BatchSamplerShard(self.index_sampler, groups, group, decided.split, even)
        return dataset

    def _resize_batches(self, size: int | None) -> None:
        """Set the batch size of torch's batch sampler, which `split_batches` divides."""
        if type(self.index_sampler) is BatchSampler and size != self.index_sampler.batch_size:
            self.index_sampler = copy(self.index_sampler)
            self.index_sampler.batch_size = size

    def _synchronize(self) -> None:
        """Give a random sampler without a generator one that has the same seed on all processes."""
        sampler = self.sampler
        if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
            return
        if sampler.generator is None:
            drawn = int(torch.empty((), dtype=torch.int64).random_().item())
            seeded = copy(sampler)
            seeded.generator = torch.Generator().manual_seed(self._of_process_0(drawn))
            self.index_sampler = _with_sampler(self.index_sampler, seeded, sampler)
            sampler = seeded
        self.generator = sampler.generator

    def _of_process_0(self, seed: int) -> int:
        return seed if self.num_processes == 1 else int(current_transport().broadcast_object(seed, 0))


def _with_sampler(index_sampler: Any, sampler: Any, old: Any) -> Any:
    if index_sampler is old:
        return sampler
    changed = copy(index_sampler)
    if (inner := getattr(changed, "batch_sampler", None)) is not None:
        changed.batch_sampler = _with_sampler(inner, sampler, old)
    else:
        changed.sampler = sampler
    return changed


def _shard_of_iterable(loader: DataLoader[Any], decided: ShardPlan) -> IterableDatasetShard:
    if is_sharded(loader, decided.groups, decided.group):
        own: IterableDatasetShard = copy(loader.dataset)  # type: ignore[assignment]
        own.tagged = own.part_size == loader.batch_size  # else its batches are not those of the loader
        own.first_round = FirstRound()
        return with_state(own)
    shard = IterableDatasetShard(
        loader.dataset,
        batch_size=decided.batch_size or 1,
        drop_last=loader.drop_last,
        num_processes=decided.groups,
        process_index=decided.group,
    )
    shard.tagged = True
    return with_state(shard)
