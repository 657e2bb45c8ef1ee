"""What all prepared loaders share: a `DataLoader`, and the position within the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import new_class
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from accelerate.base import StateError, is_torchdata_stateful_dataloader_available, require
from accelerate.data_loader import position, workers
from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.plan import ShardPlan
from accelerate.data_loader.position import BEGINNING, Place, Position, after_first, stream_of
from accelerate.data_loader.reading import IndexAhead, mark_last, read_past
from accelerate.data_loader.samplers import BatchSamplerShard, SamplerShard, SkipBatchSampler
from accelerate.data_loader.validity import CountingCollate, Counts, Fillers, untagged
from accelerate.nested import ignorant_find_batch_size
from accelerate.ops import current_transport
from accelerate.state import GradientState, services

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
_LIVE = ("gradient_state", "_iterator", "origin", "_route", "_step")
_GOLDEN = 0x9E3779B97F4A7C15  # odd and without pattern: seeds of neighbouring groups share no bits


Carrier = Callable[[Iterator[Any]], Iterator[Any]]


class DataLoaderStateMixin:
    """Where a loader is in its epoch; `GradientState` reports it for the loader that is being read.

    Attributes:
        end_of_dataloader: Whether the batch just yielded is the last one.
        remainder: With the last batch of a loader of known length, the number of real samples in it over all
            processes, 0 where the length divides evenly; -1 otherwise.
        valid_counts: For the batch just yielded, the number of real samples on each data-parallel rank; None
            when all are real and ranks have equally many.
        batch_rows: The samples this rank was given, filler included, where `valid_counts` are told, where
            batches are ready ones, or where ranks share them; None otherwise, and when the batch does not
            tell.
        shares_batches: Whether several ranks are given the same batch.
        deals_ready_batches: Whether the dataset's own batches are dealt whole to the ranks: one may be larger
            than another, and `valid_counts` is right for this rank only.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    valid_counts: Counts | None = None
    batch_rows: int | None = None
    deals_ready_batches: bool = False
    shares_batches: bool = False
    gradient_state: GradientState

    def reset(self) -> None:
        """Forget the last pass."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.note_counts(None, None)

    def note_counts(self, counts: Counts | None, batch: Any) -> None:
        """Note what is known of the batch that is given next.

        Args:
            counts: Real samples on each data-parallel rank; None when all are real and ranks have equally
                many.
            batch: The batch of this rank.
        """
        self.valid_counts = counts
        is_told = counts is not None or self.deals_ready_batches or self.shares_batches
        self.batch_rows = ignorant_find_batch_size(batch) if is_told else None

    def begin(self) -> None:
        """A pass starts: this loader becomes the active one."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """A pass ended, at its last batch or before: the loader around it, if any, is active again."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter(DataLoader[Any]):
    """A torch `DataLoader`, or torchdata's `StatefulDataLoader`, that prepared loaders build on.

    Args:
        dataset: The dataset.
        use_stateful_dataloader: Go on by itself after a checkpoint was loaded; `state_dict` holds the
            position after the batch just yielded. Where torchdata is installed, be its `StatefulDataLoader`
            too.
        batch_sampler: As for `torch.utils.data.DataLoader`.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    plan: ShardPlan = ShardPlan()
    iteration: int = 0
    skip_batches: int = 0
    use_stateful_dataloader: bool = False
    _drop_last: bool = False
    _told_epoch: int | None = None
    skip_source: int = 0
    """Batches of the dataset that are passed over at the start of each pass, on top of `skip_batches`."""
    keeps_first_round: bool = False
    """Whether a pass, which begins later, is given the first round of the epoch all the same."""
    is_over: bool = False
    """Whether nothing is left of the epoch that this loader is a late start of."""
    begins_at: Place = BEGINNING
    """Where in the epoch each pass begins."""
    _group_of: list[int] | None = None
    origin: Any = None
    """The loader that this one is a late start of; both count epochs together."""

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader and is_torchdata_stateful_dataloader_available():
            self.__class__ = _stateful(type(self))  # type: ignore[arg-type]  # classes can be hashed
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader
        self.position = Position()
        self.dl_state_dict: dict[str, Any] | None = None

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The torch loader: this object itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.plan}>"

    def __len__(self) -> int:
        return 0 if self.is_over else max(self._source_length() - self.skip_batches, 0)

    def _source_length(self) -> int:
        """The number of batches that torch's iterator gives."""
        return super().__len__()

    @property
    def batches_in_round(self) -> int:
        """How many batches of the dataset all groups together take at a time."""
        return 1 if self.plan.split else self.plan.groups

    @property
    def batches_kept(self) -> int:
        """How many batches at the beginning of an epoch a late start reads, to fill the end of the epoch."""
        return 0

    @property
    def batches_per_step(self) -> int:
        """How many batches of the dataset make one batch of this loader, as far as skipping is concerned."""
        return 1

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: value for name, value in self.__dict__.items() if name not in _LIVE}
        plain = type(self).__mro__[1] if self.is_by_torchdata else type(self)
        return _restore, (plain, self.is_by_torchdata, kept)

    def groups_of_ranks(self) -> Sequence[int]:
        """The data-parallel group of each process; called on all ranks, which ask each other the first time
        where several make up one group."""
        transport = current_transport()
        if self.plan.groups == transport.size:
            return range(transport.size)
        if self._group_of is None:
            self._group_of = transport.gather_object(self.plan.group)
        return self._group_of

    # Position of a stateful loader

    @property
    def is_by_torchdata(self) -> bool:
        """Whether this is torchdata's `StatefulDataLoader` too."""
        return hasattr(super(), "state_dict")

    @property
    def torchdata_goes_on(self) -> bool:
        """Whether torchdata reads and goes on: where data can only be read in order, and no rank waits for
        another."""
        is_read_in_order = self._dataset_kind == _DatasetKind.Iterable
        return self.is_by_torchdata and is_read_in_order and not self.plan.own_shares

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch just yielded; needs `use_stateful_dataloader`."""
        self._check_stateful()
        if not self.torchdata_goes_on:
            return position.capture(self) or {}
        if self.dl_state_dict is None:
            self._update_state_dict()
        return cast(dict[str, Any], self.dl_state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position that `state_dict` gave; needs `use_stateful_dataloader`."""
        self._check_stateful()
        if not self.torchdata_goes_on:
            position.restore(self, state_dict)
            return
        cast(Any, super()).load_state_dict(state_dict)
        self.dl_state_dict = state_dict

    @property
    def place(self) -> Place:
        """The point in the epoch behind the batch just yielded."""
        return self.position.place

    @place.setter
    def place(self, place: Place) -> None:
        self.position.place = place

    def adjust_state_dict_for_prefetch(self) -> None:
        """Correct `dl_state_dict` for batches read ahead; nothing to do: it is taken before anything is."""

    def _check_stateful(self) -> None:
        if not self.use_stateful_dataloader:
            raise StateError("This loader keeps no position. Prepare it with use_stateful_dataloader=True.")

    def _update_state_dict(self) -> None:
        """Record the position; called before a batch is read ahead."""
        self.dl_state_dict = self._position()
        self.adjust_state_dict_for_prefetch()

    def _position(self) -> dict[str, Any]:
        """The position of torch's iterator; any thread that reads may ask for it."""
        return cast(dict[str, Any], cast(Any, super()).state_dict())

    # The sampler

    def get_sampler(self) -> Any:
        """The innermost sampler: the one that orders the indices; None where there is none."""
        return sampler_under(self._index_sampler, self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the innermost sampler."""
        innermost(self._index_sampler).sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at an epoch: sampler, batch sampler and dataset are told, where they listen.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.iteration = epoch
        self._told_epoch = epoch
        for listener in self._epoch_listeners():
            listener.set_epoch(epoch)

    def _epoch_listeners(self) -> Iterator[Any]:
        index_sampler = self._index_sampler
        chain = [self.dataset, index_sampler]
        while (index_sampler := getattr(index_sampler, "batch_sampler", None)) is not None:
            chain.append(index_sampler)
        chain.append(self.get_sampler())
        seen: set[int] = set()
        for listener in chain:
            owner = getattr(listener, "set_epoch", None)
            if callable(owner) and id(listener) not in seen:
                seen.add(id(listener))
                yield listener

    def _agree_on_epoch(self) -> int:
        """Bring all that depends on the epoch to the same one; an epoch that the user set on it wins."""
        told = self._told_epoch
        own = (0,) if told is None else (told, told + 1)  # samplers may advance by themselves
        for listener in self._epoch_listeners():
            epoch = getattr(listener, "epoch", None)
            if isinstance(epoch, int) and epoch not in (*own, self.iteration):
                self.iteration = epoch
        self.set_epoch(self.iteration)
        return self.iteration

    def _advance(self, epoch: int) -> None:
        """The pass at `epoch` is over, here and in the loader this one is a late start of."""
        self.position.end()
        for loader in (self, self.origin):
            if loader is not None and loader.iteration == epoch:
                loader.iteration = epoch + 1

    # Reading

    def _open_source(
        self, skip: int, carrier: Carrier | None = None
    ) -> tuple[Iterator[tuple[Any, bool]], Fillers]:
        """Start a pass.

        Args:
            skip: how many batches are read and thrown away; others in front are passed over by index.
            carrier: takes torch's iterator and gives the batches on; None: nobody in between.

        Returns:
            The batches, each with whether it is the last one, and the record of fillers that comes with them.
        """
        source, ahead, fillers = self._open_batches(skip)
        if ahead is not None and carrier is None:
            return ahead.mark_last(source), fillers
        return mark_last(self, source if carrier is None else carrier(source)), fillers

    def _open_batches(
        self, skip: int, kept: int = 0, ahead_by: int | None = None
    ) -> tuple[Iterator[Any], IndexAhead | None, Fillers]:
        """Start torch's iterator, where the order of the pass is drawn.

        Args:
            skip: how many batches are read and thrown away.
            kept: how many of those that are passed over, at the beginning of the epoch, are given all the
                same.
            ahead_by: how many batches are read before the one that is given; None: those that torch reads
                itself, or their indices.

        Returns:
            The batches, the indices they are read by where those are drawn in this process, and the record of
            fillers.
        """
        if self.is_over:
            self.position.resume, self.position.place = None, self.begins_at
            return iter(()), None, {}
        self._go_on_with_stream()
        resume = self.position.resume
        goes_on = resume is not None and self.torchdata_goes_on and self.origin is None
        begins_at = resume.place if resume is not None and goes_on else self.begins_at
        order_is_drawn = self.position.begin(self, begins_at)
        source: Any = super().__iter__() if self.torchdata_goes_on else DataLoader.__iter__(self)
        if (
            type(source) is _SingleProcessDataLoaderIter
            and self._dataset_kind == _DatasetKind.Map
            and not skip
        ):
            source._sampler_iter = ahead = IndexAhead(source._sampler_iter)
            fillers = _find_fillers(self._index_sampler)
            if ahead_by is not None:
                return after_first(source, order_is_drawn, kept, ahead_by), None, fillers
            order_is_drawn()
            return source, ahead, fillers
        fillers = {} if self._is_tagged else _find_fillers(self._index_sampler)
        if self._is_tagged:
            source = untagged(source, fillers)
        if skip:
            source = read_past(source, skip, kept)
        return after_first(source, order_is_drawn, kept, ahead_by or 1), None, fillers

    def _go_on_with_stream(self) -> None:
        """Bring a dataset that has a state to the one of the checkpoint that this pass goes on from."""
        stream = self.begins_at.stream
        if stream is not None and self.position.resume is not None:
            stream_of(self).load_state_dict(stream["state"])
            self._fill_with(stream["first"])

    def choose_note(self) -> Callable[[], Any] | None:
        """What takes the states of the batch just read, before one more is read; None: there are none."""
        if self.torchdata_goes_on:
            return self._position
        stream = stream_of(self)
        if stream is None:
            return None
        return lambda: {"state": stream.state_dict(), "first": self._first_round()}

    def keep_note(self, note: Any) -> None:
        """Say of the batch just given the states that were noted of it."""
        if self.torchdata_goes_on:
            self.dl_state_dict = note
            self.adjust_state_dict_for_prefetch()
        else:
            self.position.stream = note

    def capture_stream(self) -> dict[str, Any]:
        """Return the state of a dataset that is read in order; empty where none was read in this epoch."""
        if not self.torchdata_goes_on:
            return {} if self.position.stream is None else {"dataset": self.position.stream}
        if not self.position.seen or self.dl_state_dict is None:  # to ask torchdata would start a pass
            return {}
        return {"torchdata": self.dl_state_dict, "first": self._first_round()}

    def go_on_by_torchdata(self, captured: dict[str, Any]) -> None:
        """Go on from what `capture_stream` returned for torchdata."""
        self._fill_with(captured.get("first", []))
        self.load_state_dict(captured["torchdata"])

    def _first_round(self) -> list[Any]:
        """What fills the end of the pass that is under way."""
        return self.dataset.first if isinstance(self.dataset, IterableDatasetShard) else []

    def _fill_with(self, first: list[Any]) -> None:
        """Fill the end of the next pass with the first round of an epoch that is gone on with."""
        if isinstance(self.dataset, IterableDatasetShard):
            self.dataset.goes_on_with = first

    @property
    def _is_tagged(self) -> bool:
        return getattr(self.dataset, "tagged", False)

    def _get_iterator(self) -> Any:
        """Torch's own hook: its iterator reads the loader's settings here, and three of them are ours."""
        collate, generator, init = self.collate_fn, self.generator, self.worker_init_fn
        if self._is_tagged:
            self.collate_fn = CountingCollate(collate)
        if self.plan.group and self.num_workers:
            self.generator = _generator_of_group(generator, self.plan.group)
        if self.num_workers:
            self.worker_init_fn = workers.make_askable(self)
        try:
            iterator = super()._get_iterator() if self.torchdata_goes_on else DataLoader._get_iterator(self)
        finally:
            self.collate_fn, self.generator, self.worker_init_fn = collate, generator, init
        if self.num_workers:
            services.get(workers.WorkersObserver, workers.WorkersObserver).follow(iterator)
        return iterator

    @property
    def _counts_batches(self) -> bool:
        """Whether what is dealt out are whole batches: the loader doesn't build batches itself."""
        is_ready_made = not self._auto_collation and not isinstance(self.sampler, BatchSampler)
        return is_ready_made and not self.plan.own_shares

    def _first_number(self) -> int:
        """Number, in the whole pass, of the first batch that torch's iterator gives."""
        number, sampler = 0, self._index_sampler
        while isinstance(sampler, SkipBatchSampler):
            number, sampler = number + sampler.skip_batches, sampler.batch_sampler
        return number


def innermost(index_sampler: Any) -> Any:
    """The batch sampler, or sampler, under all that wrap it."""
    while (inner := getattr(index_sampler, "batch_sampler", None)) is not None:
        index_sampler = inner
    return index_sampler


def sampler_under(index_sampler: Any, loader: DataLoader[Any]) -> Any:
    """The sampler that orders the indices of a loader, None for a batch sampler that has none.

    Args:
        index_sampler: What the loader reads by, or is going to.
        loader: The loader.
    """
    inner = innermost(index_sampler)
    return getattr(inner, "sampler", None if loader._auto_collation else inner)


def kept_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Everything about a loader that sharing it out does not change, as arguments for a new one."""
    return {name: getattr(loader, name) for name in _KEPT}


def find_shard(index_sampler: Any) -> BatchSamplerShard | SamplerShard | None:
    """The shard in a chain of samplers, None where nothing is shared."""
    while isinstance(index_sampler, SkipBatchSampler):
        index_sampler = index_sampler.batch_sampler
    return index_sampler if isinstance(index_sampler, (BatchSamplerShard, SamplerShard)) else None


def _find_fillers(index_sampler: Any) -> Fillers:
    shard = find_shard(index_sampler)
    return {} if shard is None else shard.fillers


def _generator_of_group(generator: torch.Generator | None, group: int) -> torch.Generator:
    """A generator for the seeds of the workers: one draw from the user's, different for each group."""
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    return torch.Generator().manual_seed((drawn + group * _GOLDEN) % 2**64)


@cache
def _stateful(cls: type) -> type:
    require("torchdata", "use_stateful_dataloader")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return new_class(
        cls.__name__, (cls, StatefulDataLoader), {}, lambda body: body.update(__module__=cls.__module__)
    )


def _restore(plain: type, stateful: bool, kept: dict[str, Any]) -> Any:
    loader: Any = object.__new__(_stateful(plain) if stateful else plain)
    loader.__dict__.update(kept, _iterator=None, gradient_state=GradientState())
    return loader
