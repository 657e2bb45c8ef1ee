"""What all prepared loaders are made of: a torch loader, its plan, and the position within the epoch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.base import StateError, is_torchdata_stateful_dataloader_available, require
from accelerate.data_loader import resume
from accelerate.data_loader.last_batch import Counts, FirstRound, remainder_ahead
from accelerate.data_loader.plan import BY_HAND
from accelerate.data_loader.rank_aware import nested_samplers
from accelerate.data_loader.reading import open_iterator, settings_of_workers
from accelerate.data_loader.samplers import BatchSamplerShard, IterableDatasetShard, chain_of, shard_of
from accelerate.ops import current_transport
from accelerate.state import GradientState

if TYPE_CHECKING:  # an instance is a `DataLoader` by its `__class__`: it has one, and is made from none
    _Base = DataLoader[Any]
else:
    _Base = object

_OF_TORCH = frozenset(inspect.signature(DataLoader).parameters)
_OF_ORDER = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
_NOT_COPIED = ("gradient_state", "_route", "iterator")

BatchMetadata = dict[str, Any]  # the attributes of a loader that describe the batch just yielded

_OF_BATCH = ("end_of_dataloader", "remainder", "valid_counts", "batch_rows", "dl_state_dict")
_OF_POSITION = ("offset", "is_over", "read_states")


class DataLoaderStateMixin:
    """Where a loader is in its epoch; `GradientState` reports it for the loader that is being read.

    Attributes:
        end_of_dataloader: Whether the batch just yielded is the last one.
        remainder: The number of real samples in the last batch over all processes, 0 where the length divides
            evenly. During the whole pass where each rank reads a shard of known length, otherwise with the
            last batch; -1 where it is not known, and with `drop_last`.
        valid_counts: For the batch just yielded, the number of real samples on each data-parallel rank; None
            when all are real and ranks have equally many, as many as in a full batch.
        batch_rows: The samples of the batch on this rank, padding included; None when the batch has no size.
        full_rows: The samples of a full batch on this rank: the declared batch size, or those of the first
            batch of the pass; None when batches have no size.
        rows_per_sample: The rows that the collate function makes of each sample, by the first batch of the
            pass; 0 where it makes other numbers of rows.
        shares_batches: Whether several ranks get the same batch.
        deals_ready_batches: Whether the dataset's own batches are shared whole between the ranks: one may be
            larger than another, and `valid_counts` is right for this rank only.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    valid_counts: Counts | None = None
    batch_rows: int | None = None
    full_rows: int | None = None
    rows_per_sample: int = 1
    deals_ready_batches: bool = False
    shares_batches: bool = False
    gradient_state: GradientState

    def reset(self) -> None:
        """Forget the last pass."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.valid_counts = self.batch_rows = None
        self.full_rows = getattr(self, "nominal_rows", None)
        self.rows_per_sample = 1

    def note_counts(self, counts: Counts | None, rows: int | None) -> None:
        """Set `valid_counts` and `batch_rows` for the batch that this rank yields next."""
        self.valid_counts = counts
        self.batch_rows = rows
        if self.full_rows is None:
            self.full_rows = rows

    def begin(self) -> None:
        """A pass starts: this loader becomes the active one."""
        self.reset()
        self.remainder = remainder_ahead(self)
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """A pass ended, at its last batch or before: the loader around it, if any, is active again."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter(_Base):
    """A torch `DataLoader`, or torchdata's `StatefulDataLoader`, that prepared loaders build on.

    It holds the torch loader as `base_dataloader`. What is not an attribute of this object is one of that
    loader, and assigning one of torch's settings assigns it there.

    Args:
        dataset: The dataset.
        use_stateful_dataloader: Resume by itself after a checkpoint was loaded; `state_dict` holds the
            position after the batch just yielded. Where torchdata is installed, be its `StatefulDataLoader`
            too.
        batch_sampler: As for `torch.utils.data.DataLoader`.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    iterator: Any = None
    """The iterator of torch or torchdata that the current pass reads; not copied with the loader."""
    reads_in_order: bool = False
    """Whether map-style data is read in order, too, so that torchdata keeps the position."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        is_in_order = isinstance(dataset, IterableDataset) or self.reads_in_order
        kind = _stateful_class() if self.is_by_torchdata and is_in_order else DataLoader
        self.base_dataloader: DataLoader[Any] = kind(dataset, batch_sampler=batch_sampler, **kwargs)
        self.plan = BY_HAND
        self.position = resume.Position()
        self.start = resume.LateStart()
        own = isinstance(dataset, IterableDatasetShard)
        self.first_round: FirstRound = dataset.first_round if own else FirstRound()
        self.dl_state_dict: dict[str, Any] | None = None
        self.iteration = 0
        self.skip_batches = 0
        self._drop_last = False
        self._chosen_epoch: int | None = None
        self._group_of: list[int] | None = None

    @property  # type: ignore[misc]  # nothing assigns it
    def __class__(self) -> Any:
        """What `isinstance` sees besides the type: the class of torch's, or torchdata's, loader."""
        return _stateful_class() if self.is_by_torchdata else type(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base_dataloader")
        if base is None or not hasattr(base, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_TORCH:
            setattr(self.base_dataloader, name, value)
        else:
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        state["base_dataloader"] = resume.copy_with(self.base_dataloader)
        state["start"] = replace(self.start, origin=None)
        return _restore, (type(self), state)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.plan}>"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return open_iterator(self)

    def __len__(self) -> int:
        skipped = self.skip_batches + self.start.skip_source
        return 0 if self.start.is_over else max(len(self.base_dataloader) - skipped, 0)

    @property
    def counts_batches(self) -> bool:
        """Whether ranks share whole batches: the loader doesn't build batches itself."""
        is_ready_made = self.batch_sampler is None and not isinstance(self.sampler, BatchSampler)
        return is_ready_made and self.plan.how != "dataset_shards"

    @property
    def batches_kept(self) -> int:
        """How many batches at the beginning of an epoch a late start reads, to fill the end of the epoch."""
        if self.plan.own_shares:
            return 1
        return self.plan.batches_in_round if self.plan.how == "dispatch" and not self._drop_last else 0

    @property
    def nominal_rows(self) -> int | None:
        """The declared batch size of one rank; None where the loader or its sampler declares none."""
        size = getattr(self._index_sampler, "batch_size", None)
        if not isinstance(size, int):
            return None
        shard = shard_of(self._index_sampler)
        if isinstance(shard, BatchSamplerShard):
            return size // shard.num_processes if shard.split_batches else size
        return size // self.plan.groups if self.plan.how == "dispatch" and self.plan.split else size

    @property
    def has_fixed_batches(self) -> bool:
        """Whether all batches but the last one have the declared size, as those of torch's `BatchSampler`."""
        shard = shard_of(self._index_sampler)
        source = shard.batch_sampler if isinstance(shard, BatchSamplerShard) else self._index_sampler
        return type(source) is BatchSampler

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole dataset."""
        dataset: Any = self.dataset
        if hasattr(dataset, "total_length"):
            return int(dataset.total_length)
        return len(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)

    def groups_of_ranks(self) -> Sequence[int]:
        """The data-parallel group of each process; called on all ranks, which exchange them where needed."""
        transport = current_transport()
        if self.plan.groups == transport.size:
            return range(transport.size)
        if self._group_of is None:
            self._group_of = transport.gather_object(self.plan.group)
        return self._group_of

    # The state of a stateful loader

    @property
    def is_by_torchdata(self) -> bool:
        """Whether this is torchdata's `StatefulDataLoader` too."""
        return self.use_stateful_dataloader and is_torchdata_stateful_dataloader_available()

    @property
    def torchdata_resumes(self) -> bool:
        """Whether torchdata reads and resumes: data that is read in order, and no rank waits for another."""
        return hasattr(self.base_dataloader, "state_dict")

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch just yielded; needs `use_stateful_dataloader`."""
        self._check_stateful()
        if not self.torchdata_resumes:
            return resume.capture(self) or {}
        if self.dl_state_dict is None:
            self.dl_state_dict = self.torchdata_state()
            self.adjust_state_dict_for_prefetch()
        return self.dl_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a position that `state_dict` returned; needs `use_stateful_dataloader`."""
        self._check_stateful()
        if not self.torchdata_resumes:
            resume.restore(self, state_dict)
            return
        cast(Any, self.base_dataloader).load_state_dict(state_dict)
        self.dl_state_dict = state_dict

    def adjust_state_dict_for_prefetch(self) -> None:
        """Correct `dl_state_dict` for batches read ahead; nothing to do: it is captured before they are."""

    def _check_stateful(self) -> None:
        if not self.use_stateful_dataloader:
            raise StateError("This loader keeps no position. Prepare it with use_stateful_dataloader=True.")

    def torchdata_state(self) -> dict[str, Any]:
        """The position of torchdata's iterator; any thread that reads may ask for it."""
        base = cast(Any, self.base_dataloader)
        with nullcontext() if base._iterator is not None else settings_of_workers(self):  # makes an iterator
            return cast(dict[str, Any], base.state_dict())

    # The epoch and the sampler

    def get_sampler(self) -> Any:
        """The innermost sampler: the one that orders the indices; None where there is none."""
        return sampler_under(self._index_sampler, self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the innermost sampler."""
        *_, inner = chain_of(self._index_sampler)
        inner.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at an epoch; set it on sampler, batch sampler and dataset where they have one.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.iteration = epoch
        self._chosen_epoch = epoch
        for owner in self._with_epoch():
            owner.set_epoch(epoch)

    def _with_epoch(self) -> list[Any]:
        """The dataset, batch samplers and sampler that have a `set_epoch`."""
        owners = [self.dataset, *nested_samplers(self._index_sampler)]
        different = {id(owner): owner for owner in owners}
        return [owner for owner in different.values() if callable(getattr(owner, "set_epoch", None))]

    def _agree_on_epoch(self) -> int:
        """Set the same epoch on all that have one; an epoch that the user set on one of them wins."""
        chosen = self._chosen_epoch
        own = (0,) if chosen is None else (chosen, chosen + 1)  # samplers may advance by themselves
        for owner in self._with_epoch():
            epoch = getattr(owner, "epoch", None)
            if isinstance(epoch, int) and epoch not in (*own, self.iteration):
                self.iteration = epoch
        self.set_epoch(self.iteration)
        return self.iteration

    def _advance(self, epoch: int) -> None:
        """End the pass at `epoch`, here and in the loader of which this one is a late start."""
        self.position.was_left_early = not self.position.is_over
        self.position.end()
        for loader in (self, self.start.origin):
            if loader is not None and loader.iteration == epoch:
                loader.iteration = epoch + 1


class Pass:
    """A pass over a loader: agree on the epoch, be the active loader, and count the epoch at the end.

    A class, because on Python 3.10 `contextmanager` keeps the frames of a pass that is left early, and so its
    workers, until the next garbage collection.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __enter__(self) -> None:
        self.epoch = self.loader._agree_on_epoch()
        self.num_restored = self.loader.position.num_restored
        self.loader.begin()

    def __exit__(self, *error: object) -> None:
        self.loader.end()
        self.loader.iterator = None
        if self.loader.position.num_restored == self.num_restored:  # else the loader is at a checkpoint
            self.loader._advance(self.epoch)
        if self.loader.torchdata_resumes and not self.loader.persistent_workers:
            self.loader.base_dataloader._iterator = None  # its workers end with the pass, not with the loader


def get_batch_metadata(loader: Any) -> BatchMetadata:
    """Return the metadata of the batch just yielded, for batches that are used later than they are read."""
    metadata = {name: getattr(loader, name) for name in _OF_BATCH if hasattr(loader, name)}
    position = getattr(loader, "position", None)
    return metadata | {name: getattr(position, name) for name in _OF_POSITION if position is not None}


def set_batch_metadata(loader: Any, metadata: BatchMetadata) -> None:
    """Set the attributes of a loader to what they were for a batch."""
    for name, value in metadata.items():
        setattr(loader.position if name in _OF_POSITION else loader, name, value)


def sampler_under(index_sampler: Any, loader: DataLoader[Any]) -> Any:
    """The sampler that orders the indices which a loader reads by; None where there is none."""
    *_, inner = chain_of(index_sampler)
    return getattr(inner, "sampler", inner if loader.batch_sampler is None else None)


def kept_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Everything about a loader that preparing it does not change, as arguments for a new one."""
    return {name: getattr(loader, name) for name in _OF_TORCH - _OF_ORDER}


def _stateful_class() -> Any:
    require("torchdata", "use_stateful_dataloader")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def _restore(kind: type, state: dict[str, Any]) -> Any:
    loader: Any = object.__new__(kind)
    loader.__dict__.update(state, gradient_state=GradientState())
    return loader
