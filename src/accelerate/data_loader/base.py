"""Base classes of all prepared loaders, which hold a torch loader, its plan and its position.

`DataLoaderShard`, `DataLoaderDispatcher` and `SkipDataLoader` derive from both classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.base import StateError, is_torchdata_stateful_dataloader_available, require
from accelerate.data_loader import resume
from accelerate.data_loader.constant_batches import ConstantBatchShard, StepPart
from accelerate.data_loader.iterable_shard import IterableDatasetShard
from accelerate.data_loader.last_batch import Counts, PaddingSource, remainder_ahead
from accelerate.data_loader.late_start import copy_with
from accelerate.data_loader.plan import UNPREPARED, ShardPlan
from accelerate.data_loader.position import PassStart, Position, Tracker, is_tracked
from accelerate.data_loader.rank_aware import nested_samplers
from accelerate.data_loader.reading import open_iterator, settings_of_workers
from accelerate.data_loader.samplers import BatchSamplerShard, batch_samplers_of, first_number, shard_of
from accelerate.ops import current_transport
from accelerate.state import GradientState

if TYPE_CHECKING:  # its `__class__` makes an instance a `DataLoader`, which it does not derive from
    _Base = DataLoader[Any]
else:
    _Base = object

_TORCH_SETTINGS = frozenset(inspect.signature(DataLoader).parameters)
_ORDER_SETTINGS = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
_MISSING = object()
_NOT_COPIED = ("gradient_state", "_channel", "iterator", "latest_batch")

BatchMetadata = dict[str, Any]
"""The attributes of a loader that describe the batch just yielded."""

_BATCH_ATTRIBUTES = (
    *("end_of_dataloader", "remainder", "valid_counts", "batch_rows"),
    *("step_part", "dl_state_dict"),
)


class DataLoaderStateMixin:
    """State of a loader within its epoch, which `GradientState` reports for the loader that is being read.

    Attributes:
        end_of_dataloader: Whether the batch just yielded is the last one.
        remainder: The number of real samples in the last batch over all processes, 0 if the length divides
            evenly. If each rank reads a shard of known length, it is set during the whole pass, otherwise
            with the last batch. -1 if it is not known, and with `drop_last`.
        valid_counts: For the batch just yielded, the number of real samples on each data-parallel rank. None
            if all are real and ranks have equally many, as many as in a full batch.
        batch_rows: The number of samples of the batch on this rank, with padding. None if the batch has no
            size.
        full_rows: The number of samples of a full batch on this rank: the declared batch size, or that of the
            first batch of the pass. None if batches have no size.
        step_part: For the batch just yielded, its part of a global batch of a constant size. None without
            `global_batch_size`.
        rows_per_sample: The number of rows that the collate function makes of each sample, by the first batch
            of the pass. 0 if the number differs between samples.
        latest_batch: The batch just yielded, until the next one is read.
        began_at: The time at which the pass began, in nanoseconds of `time.perf_counter_ns`.
        read_at: The time at which the batch was yielded.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    valid_counts: Counts | None = None
    batch_rows: int | None = None
    full_rows: int | None = None
    step_part: StepPart | None = None
    rows_per_sample: int = 1
    latest_batch: Any = None
    began_at: int = 0
    read_at: int = 0
    gradient_state: GradientState

    @property
    def replicates_batches(self) -> bool:
        """True if several ranks get the same batch."""
        return False

    @property
    def shards_whole_batches(self) -> bool:
        """True if whole batches of any size are sharded, and `valid_counts` is right for this rank only."""
        return False

    def reset(self) -> None:
        """Forgets the last pass."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.valid_counts = self.batch_rows = self.step_part = None
        self.full_rows = getattr(self, "nominal_rows", None)
        self.rows_per_sample = 1
        self.latest_batch = None
        self.began_at = perf_counter_ns()

    def set_counts(self, counts: Counts | None, rows: int | None) -> None:
        """Sets `valid_counts` and `batch_rows` for the batch that this rank yields next."""
        self.valid_counts = counts
        self.batch_rows = rows
        if self.full_rows is None:
            self.full_rows = rows

    def begin(self) -> None:
        """Begins a pass, in which this loader is the active one."""
        self.reset()
        self.remainder = remainder_ahead(self)
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Ends a pass, at its last batch or before, after which the outer loader, if any, is active again."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter(_Base):
    """Holder of a torch `DataLoader`, or torchdata's `StatefulDataLoader`, that prepared loaders build on.

    The torch loader is `base_dataloader`. The settings of torch are stored there; attributes that this object
    does not have are those of the torch loader.

    Args:
        dataset: The dataset.
        use_stateful_dataloader: Whether the loader resumes by itself after a checkpoint was loaded;
            `state_dict` returns the position after the batch just yielded. If torchdata is installed, the
            loader is an instance of its `StatefulDataLoader` too.
        batch_sampler: As for `torch.utils.data.DataLoader`.
        **kwargs: As for `torch.utils.data.DataLoader`; `prepare_data_loader` adds `_plan`, the `ShardPlan`.
    """

    iterator: Any = None
    """The iterator of torch or torchdata that the current pass reads; not copied with the loader."""
    device: Any = None
    """Device of the batches; None leaves them where they are."""
    _non_blocking: bool = False
    reads_in_order: bool = False
    """Whether map-style data is read in order, too, so that torchdata keeps the position."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.plan: ShardPlan = kwargs.pop("_plan", UNPREPARED)
        self.use_stateful_dataloader = use_stateful_dataloader
        is_in_order = isinstance(dataset, IterableDataset) or self.reads_in_order
        # Ranks that wait for each other cannot read on as torchdata does.
        is_independent = self.plan.mode != "dataset_shards"
        kind = _stateful_class() if self.is_by_torchdata and is_in_order and is_independent else DataLoader
        self.base_dataloader: DataLoader[Any] = kind(dataset, batch_sampler=batch_sampler, **kwargs)
        self.tracker = Tracker()
        self.start = PassStart()
        is_shard = isinstance(dataset, IterableDatasetShard)
        self.padding_source: PaddingSource = dataset.padding_source if is_shard else PaddingSource()
        self.dl_state_dict: dict[str, Any] | None = None
        self.iteration = 0
        self.skip_batches = 0
        self._drop_last = False
        self._chosen_epoch: int | None = None
        self._group_of: list[int] | None = None

    @property  # type: ignore[misc]  # never assigned
    def __class__(self) -> Any:
        """The class of the torch or torchdata loader, for `isinstance`."""
        return _stateful_class() if self.is_by_torchdata else type(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base_dataloader")
        value = _MISSING if base is None else getattr(base, name, _MISSING)
        if value is _MISSING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return value

    @property
    def position(self) -> Position:
        """The position after the batch just yielded."""
        return self.tracker.position

    @property
    def seen(self) -> int:
        """Number of batches that the loop has taken in this epoch."""
        return self.tracker.seen

    @property
    def _index_sampler(self) -> Any:
        return self.base_dataloader._index_sampler

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        state["base_dataloader"] = copy_with(self.base_dataloader)
        state["start"] = replace(self.start, origin=None)
        return _restore, (type(self), state)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.plan}>"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return open_iterator(self)

    def begin_pass(self) -> Any:
        """Begins a pass, and returns the loader that makes it, which is this one or a late start of it."""
        return self

    def __len__(self) -> int:
        skipped = self.skip_batches + self.start.skip_source
        return 0 if self.start.position.is_over else max(len(self.base_dataloader) - skipped, 0)

    @property
    def replicates_batches(self) -> bool:
        """True if several ranks get the same batch."""
        return self.plan.replicates

    @property
    def counts_batches(self) -> bool:
        """True if ranks read whole batches that the loader does not build itself."""
        is_ready_made = self.batch_sampler is None and not isinstance(self.sampler, BatchSampler)
        return is_ready_made and self.plan.mode != "dataset_shards"

    @property
    def num_padding_batches(self) -> int:
        """Number of batches at the beginning of an epoch that a late start reads to pad its end."""
        if self.plan.has_own_shards:
            return 1
        return self.plan.batches_per_step if self.plan.mode == "dispatch" and not self._drop_last else 0

    @property
    def nominal_rows(self) -> int | None:
        """The declared batch size of one rank, or None if the loader or its sampler declares none."""
        size = getattr(self._index_sampler, "batch_size", None)
        if not isinstance(size, int):
            return None
        shard = shard_of(self._index_sampler)
        if isinstance(shard, BatchSamplerShard):
            return size // shard.num_processes if shard.split_batches else size
        return size // self.plan.groups if self.plan.mode == "dispatch" and self.plan.split else size

    @property
    def num_micro_batches(self) -> int | None:
        """Number of micro-batches in a global batch of a constant size, or None without such a size."""
        shard = shard_of(self._index_sampler)
        return shard.full.num_micro_batches if isinstance(shard, ConstantBatchShard) else None

    def batches_before(self, number: int) -> int:
        """Returns the number of batches of the user that a number of batches of all groups take."""
        shard = shard_of(self._index_sampler)
        if not isinstance(shard, ConstantBatchShard):
            return number * self.plan.batches_per_step
        first = first_number(self._index_sampler)
        return shard.batches_before(first + number) - shard.batches_before(first)

    @property
    def has_fixed_batches(self) -> bool:
        """True if all batches but the last one have the declared size, as those of torch's `BatchSampler`."""
        shard = shard_of(self._index_sampler)
        source = shard.batch_sampler if isinstance(shard, BatchSamplerShard) else self._index_sampler
        return type(source) is BatchSampler

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the whole dataset."""
        dataset: Any = self.dataset
        if hasattr(dataset, "total_length"):
            return int(dataset.total_length)
        return len(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)

    def groups_of_ranks(self) -> Sequence[int]:
        """Returns the data-parallel group of each rank, which all ranks exchange if necessary."""
        transport = current_transport()
        if self.plan.groups == transport.size:
            return range(transport.size)
        if self._group_of is None:
            self._group_of = transport.gather_object(self.plan.group)
        return self._group_of

    # The state of a stateful loader

    @property
    def is_by_torchdata(self) -> bool:
        """True if this is an instance of torchdata's `StatefulDataLoader` too."""
        return self.use_stateful_dataloader and is_torchdata_stateful_dataloader_available()

    @property
    def torchdata_resumes(self) -> bool:
        """True if torchdata reads and resumes, for data that is read in order by ranks that do not wait."""
        return hasattr(self.base_dataloader, "state_dict")

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch just yielded, with `use_stateful_dataloader`."""
        self._check_stateful()
        if not self.torchdata_resumes:
            return resume.capture(self) or {}
        if self.dl_state_dict is None:
            self.dl_state_dict = self.torchdata_state()
            self.adjust_state_dict_for_prefetch()
        return self.dl_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes from a position that `state_dict` returned, with `use_stateful_dataloader`."""
        self._check_stateful()
        if not self.torchdata_resumes:
            resume.restore(self, state_dict)
            return
        cast(Any, self.base_dataloader).load_state_dict(state_dict)
        self.dl_state_dict = state_dict

    def adjust_state_dict_for_prefetch(self) -> None:
        """Does nothing, because `dl_state_dict` is captured before batches are prefetched."""

    def _check_stateful(self) -> None:
        if not self.use_stateful_dataloader:
            raise StateError("This loader keeps no position. Prepare it with use_stateful_dataloader=True.")

    def torchdata_state(self) -> dict[str, Any]:
        """Returns the position of torchdata's iterator, in any thread that reads."""
        base = cast(Any, self.base_dataloader)
        with nullcontext() if base._iterator is not None else settings_of_workers(self):  # makes an iterator
            return cast(dict[str, Any], base.state_dict())

    # The epoch and the sampler

    def get_sampler(self) -> Any:
        """Returns the innermost sampler, which orders the indices, or None."""
        return sampler_under(self._index_sampler, self)

    def set_sampler(self, sampler: Any) -> None:
        """Replaces the innermost sampler."""
        *_, inner = batch_samplers_of(self._index_sampler)
        inner.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, also on the sampler, batch sampler and dataset that have one.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self._set_epoch(epoch, self._owners_of_epoch())

    def _set_epoch(self, epoch: int, owners: Sequence[Any]) -> None:
        self.iteration = epoch
        self._chosen_epoch = epoch
        for owner in owners:
            owner.set_epoch(epoch)

    def _owners_of_epoch(self) -> list[Any]:
        """Returns the dataset, batch samplers and sampler that have a `set_epoch`."""
        owners = [self.dataset, *nested_samplers(self._index_sampler)]
        different = {id(owner): owner for owner in owners}
        return [owner for owner in different.values() if callable(getattr(owner, "set_epoch", None))]

    def _agree_on_epoch(self) -> int:
        """Sets the same epoch on all owners, that which the user has set on one of them if there is one."""
        chosen = self._chosen_epoch
        own = (0,) if chosen is None else (chosen, chosen + 1)  # samplers may advance by themselves
        owners = self._owners_of_epoch()
        for owner in owners:
            epoch = getattr(owner, "epoch", None)
            if isinstance(epoch, int) and epoch not in (*own, self.iteration):
                self.iteration = epoch
        self._set_epoch(self.iteration, owners)
        return self.iteration

    def _advance(self, epoch: int) -> None:
        """Ends the pass of an epoch, here and in the loader of which this one is a late start."""
        self.tracker.was_left_early = not self.tracker.is_over
        self.tracker.end()
        for loader in (self, self.start.origin):
            if loader is not None and loader.iteration == epoch:
                loader.iteration = epoch + 1


def _setting_of_torch(name: str) -> property:
    """Returns a property that is stored in the torch loader."""

    def read(loader: Any) -> Any:
        return getattr(loader.base_dataloader, name)

    def write(loader: Any, value: Any) -> None:
        setattr(loader.base_dataloader, name, value)

    return property(read, write)


for _name in _TORCH_SETTINGS:
    setattr(DataLoaderAdapter, _name, _setting_of_torch(_name))


def get_batch_metadata(loader: Any) -> BatchMetadata:
    """Returns the metadata of the batch just yielded, for batches that are used later than they are read."""
    metadata = {name: getattr(loader, name) for name in _BATCH_ATTRIBUTES if hasattr(loader, name)}
    return metadata | {"position": loader.tracker.position} if is_tracked(loader) else metadata


def set_batch_metadata(loader: Any, metadata: BatchMetadata) -> None:
    """Sets the attributes of a loader to their values for a batch."""
    for name, value in metadata.items():
        setattr(loader.tracker if name == "position" else loader, name, value)


def sampler_under(index_sampler: Any, loader: DataLoader[Any]) -> Any:
    """Returns the sampler that orders the indices of a loader, or None."""
    *_, inner = batch_samplers_of(index_sampler)
    return getattr(inner, "sampler", inner if loader.batch_sampler is None else None)


def kept_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the settings of a loader that preparing it does not change, as arguments for a new loader."""
    return {name: getattr(loader, name) for name in _TORCH_SETTINGS - _ORDER_SETTINGS}


def _stateful_class() -> Any:
    require("torchdata", "use_stateful_dataloader")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def _restore(kind: type, state: dict[str, Any]) -> Any:
    loader: Any = object.__new__(kind)
    loader.__dict__.update(state, gradient_state=GradientState())
    return loader
