"""Reads the batches of a prepared loader through torch's iterator.

The loaders open a pass with `open_pass` or `open_batches`, and `read_pass` yields its batches, recognizes the
last one, and moves each batch to the device.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import rng, torch_private
from accelerate.base import stack_dumps
from accelerate.data_loader.background import RandomDrawDetector
from accelerate.data_loader.constant_batches import StepRecord
from accelerate.data_loader.last_batch import (
    CountingCollate,
    PaddingRecord,
    detach_counts,
    full_rows,
    in_samples,
    last_remainder,
    rows_per_sample,
)
from accelerate.data_loader.plan import UNPREPARED
from accelerate.data_loader.position import Tracker, restore_start
from accelerate.data_loader.resume import keep_source_state, restore_stream, source_state
from accelerate.data_loader.samplers import shard_of
from accelerate.devices import of_device
from accelerate.display import track
from accelerate.nested import find_device, ignorant_find_batch_size, send_to_device
from accelerate.state import closed_at_exit, run_observers, services

_END = object()
_UNKNOWN = object()
T = TypeVar("T")
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""Odd number without a pattern, so that the seeds of neighboring groups have no bits in common."""

IteratorWrapper = Callable[[Iterator[Any]], Iterator[Any]]
"""Function from torch's iterator to an iterator over its batches that moves them in the background."""


class WorkersObserver:
    """Observer of worker processes from their start, a service of the run."""

    def follow(self, iterator: Any) -> None:
        """Observes the workers of an iterator in the thread that waits for them."""


class LastMark:
    """Mark of the last item of an iterator.

    Attributes:
        is_last: Whether the item that was yielded latest is the last one.
    """

    __slots__ = ("is_last",)

    def __init__(self) -> None:
        self.is_last = False


@dataclass
class OpenPass:
    """Batches of a pass over a loader.

    Attributes:
        batches: The batches, on the device where they are read.
        padding_record: Counts of the batches with padding; it may grow during the pass.
        number: Number of the first batch.
        full: Number of rows of a full batch that no other process shares, by the first batch; None for
            others.
    """

    batches: Iterator[Any]
    mark: LastMark
    padding_record: PaddingRecord
    number: int
    full: int | None = None


class PassContext:
    """Context of a pass over a loader, which sets its epoch, makes it the active loader and counts the epoch.

    It is a class because on Python 3.10 `contextmanager` keeps the frames of a pass that is left early, and
    so its workers, until the next garbage collection.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __enter__(self) -> None:
        self.epoch = self.loader._agree_on_epoch()
        self.num_restored = self.loader.tracker.num_restored
        self.loader.begin()

    def __exit__(self, *error: object) -> None:
        self.loader.end()
        self.loader.iterator = None
        if self.loader.tracker.num_restored == self.num_restored:  # otherwise it is at a checkpoint
            self.loader._advance(self.epoch)
        if self.loader.torchdata_resumes and not self.loader.persistent_workers:
            self.loader.base_dataloader._iterator = None  # its workers end with the pass, not with the loader


@closed_at_exit
def read_pass(loader: Any, wrap: IteratorWrapper | None = None) -> Generator[Any, None, None]:
    """Makes one pass over a loader, whose attributes are set for each batch.

    Args:
        loader: A loader with `begin_pass` and `open_pass`.
        wrap: Function that replaces torch's iterator.
    """
    loader = loader.begin_pass()
    with PassContext(loader):
        opened: OpenPass = loader.open_pass(wrap)
        mark, padding_record, number = opened.mark, opened.padding_record, opened.number
        tracker = loader.tracker
        is_divided = isinstance(padding_record, StepRecord)
        tracker.batches_per_step = 0 if is_divided else loader.plan.batches_per_step
        move: Callable[[Any], Any] | None = None
        observers, known, samples = run_observers(), _UNKNOWN, 0
        observers.pass_begun(loader)
        try:
            for batch in opened.batches:
                rows = ignorant_find_batch_size(batch)
                if rows != known or mark.is_last or padding_record:  # others are like the batch before
                    if known is _UNKNOWN:
                        move = choose_move(loader.device, loader._non_blocking, batch)
                    describe_batch(loader, opened, number, batch, rows, is_first=known is _UNKNOWN)
                    known, samples = _END if is_divided else rows, rows or 0
                tracker.seen += 1
                if move is not None:
                    batch = move(batch)
                observers.batch_read(samples)
                loader.latest_batch = batch
                loader.read_at = perf_counter_ns()
                yield batch
                loader.latest_batch = None
                observers.before_read(loader)
                number += 1
        finally:
            loader.latest_batch = None
            observers.pass_ended(loader)


def describe_batch(
    loader: Any, opened: OpenPass, number: int, batch: Any, rows: int | None, *, is_first: bool
) -> None:
    """Sets the attributes of a loader that describe a batch, if they may differ from those before."""
    plan, record, is_last = loader.plan, opened.padding_record, opened.mark.is_last
    loader.batch_rows = rows
    if plan.mode == "unsharded" and plan != UNPREPARED and rows is not None:
        if opened.full is None:
            opened.full = full_rows(loader.nominal_rows, rows, is_only=is_last)
        loader.valid_counts = (rows,) if rows < opened.full else None
    elif record:
        loader.valid_counts = in_samples(record.get(number), loader, batch)
    if isinstance(record, StepRecord):
        part = loader.step_part = record.part(number, plan.group)
        loader.tracker.consumed += part.batches
        loader.tracker.ends_step = part.is_last
    if is_first:
        set_rows(loader, rows, is_only=is_last)
    if is_last:
        loader.end_of_dataloader = loader.tracker.is_over = True
        loader.remainder = last_remainder(loader)


def set_rows(loader: Any, rows: int | None, *, is_only: bool) -> None:
    """Sets the attributes that describe the rows of all batches, by the first one."""
    if loader.full_rows is None:
        loader.full_rows = rows
    if not is_only and loader.valid_counts is None and loader.has_fixed_batches:
        loader.rows_per_sample = rows_per_sample(rows, loader.nominal_rows)


# Opening a pass


def open_pass(loader: Any, skip: int, number: int, wrap: IteratorWrapper | None = None) -> OpenPass:
    """Opens a pass whose first batch has a number, and whose last batch is marked."""
    mark = LastMark()
    source, is_marked, padding_record = open_batches(loader, skip, mark=None if wrap else mark)
    if not is_marked:
        source = mark_last(loader, source if wrap is None else wrap(source), mark)
    return OpenPass(source, mark, padding_record, number)


def open_batches(
    loader: Any, skip: int, kept: int = 0, ahead_by: int | None = None, mark: LastMark | None = None
) -> tuple[Iterator[Any], bool, PaddingRecord]:
    """Opens torch's iterator, which draws the order of the pass.

    Args:
        skip: Number of batches to skip.
        kept: Number of the skipped batches, from the first one, that are still yielded.
        ahead_by: Number of batches that are read before the one that is yielded; None for torch's own number.

    Returns:
        The batches, whether the mark is set, and the record of padding.
    """
    tracker, start = loader.tracker, loader.start
    restore_stream(loader)
    if start.position.is_over:
        tracker.end_resumed(start.position, loader)
        return iter(()), False, {}
    restored = tracker.restored
    by_torchdata = restored is not None and restored.by_torchdata and start.origin is None
    begins_at = start.position if restored is None or not by_torchdata else restored.position
    order_is_drawn = tracker.begin(loader, begins_at)
    source: Any = open_iterator(loader)
    loader.iterator = source
    if tracker.stream_may_be_over:
        tracker.stream_may_be_over = False
        source = reopen_if_empty(source, loader)
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    if type(source) is torch_private.SingleProcessIterator and is_map_style and not skip:
        indices = mark or LastMark()
        torch_private.wrap_indices(source, partial(draw_ahead, mark=indices))
        padding_record = _padding_record_of(loader)
        if ahead_by is not None:
            return after_first(source, order_is_drawn, kept, ahead_by), False, padding_record
        order_is_drawn()
        return source, mark is not None, padding_record
    padding_record = _padding_record_of(loader)
    if _attaches_counts(loader):
        source = detach_counts(source, padding_record)
    is_resumed = restored is not None and tracker.position.seen == restored.position.seen
    read_states = restored.position.read_states if restored is not None and is_resumed else None
    if skip or read_states is not None:
        source = read_past(source, skip, kept, read_states)
    source = after_first(source, order_is_drawn, kept, ahead_by or 1)
    if ahead_by is None and not loader.num_workers:
        source = track_random_states(source, tracker)
    return source, False, padding_record


def track_random_states(source: Iterator[Any], tracker: Tracker) -> Iterator[Any]:
    """Yields batches that are read one ahead, and keeps the random states before each in the tracker.

    If the second batch of a pass draws no random numbers in this process, the rest is read without.
    """
    yield from islice(source, 1)
    detector, draws = RandomDrawDetector(), None
    while draws is not False:
        before = detector.start()
        if (batch := next(source, _END)) is _END:
            return
        draws = detector.has_drawn() if draws is None else draws
        tracker.read_states = before if draws else None
        yield batch
    yield from source


def reopen_if_empty(source: Iterator[Any], loader: Any) -> Iterator[Any]:
    """Yields the batches of a source or, if it is empty, those of a new iterator of the loader.

    The dataset has its state from the end of an epoch. From there, some datasets begin the next epoch, and
    others are at their end.
    """
    first = next(source, _END)
    if first is _END:
        restore_start(loader)
        source = loader.iterator = open_iterator(loader)
    else:
        yield first
    yield from source


def open_iterator(loader: Any) -> Iterator[Any]:
    """Returns a new iterator of torch, or the one with persistent workers."""
    base: DataLoader[Any] = loader.base_dataloader
    if base.persistent_workers and base._iterator is not None:
        return iter(base)
    tracker, epoch = loader.tracker, loader.iteration
    with settings_of_workers(loader), dataset_at(loader, tracker.workers_epoch):
        iterator = iter(base)
    if base.persistent_workers and tracker.workers_epoch is None:
        tracker.workers_epoch = epoch
    if base.num_workers:
        services.get(WorkersObserver, WorkersObserver).follow(iterator)
    return iterator


@contextmanager
def dataset_at(loader: Any, epoch: int | None) -> Iterator[None]:
    """Sets the epoch of the dataset that new workers copy, by default that of the pass.

    Persistent workers keep the copy of the dataset that they started with. Workers that replace them after a
    checkpoint was loaded start with the same.
    """
    set_epoch = None if epoch is None else getattr(loader.dataset, "set_epoch", None)
    if set_epoch is None:
        yield
        return
    set_epoch(epoch)
    try:
        yield
    finally:
        set_epoch(loader.iteration)


@contextmanager
def settings_of_workers(loader: Any) -> Iterator[None]:
    """Changes three settings of the torch loader, which it reads when it makes an iterator.

    The collate function counts padding, groups draw different seeds for their workers, and workers write
    their stacks on request. A run draws the seed of persistent workers once: for those that replace them
    after a checkpoint was loaded, it is drawn from a copy of the generator.
    """
    base = loader.base_dataloader
    has_drawn = loader.tracker.workers_epoch is not None
    settings = {name: getattr(base, name) for name in ("collate_fn", "generator", "worker_init_fn")}
    if _attaches_counts(loader):
        base.collate_fn = CountingCollate(base.collate_fn)
    elif (collate := getattr(loader, "shared_memory_collate", None)) is not None:
        base.collate_fn = collate
    if base.num_workers and (loader.plan.group or has_drawn):
        source = copy_generator(base.generator) if has_drawn else base.generator
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
        base.generator = torch.Generator().manual_seed((drawn + loader.plan.group * _GOLDEN_RATIO) % 2**64)
    if base.num_workers:
        stack_dumps.offer()
        if not _forks(base):  # a forked worker has the offer of this process
            base.worker_init_fn = partial(stack_dumps.offer_in_worker, base.worker_init_fn)
    try:
        yield
    finally:
        for name, setting in settings.items():
            setattr(base, name, setting)


def copy_generator(generator: torch.Generator | None) -> torch.Generator:
    """Returns a copy of a generator, by default of that of torch."""
    copied = torch.Generator()
    copied.set_state(torch.get_rng_state() if generator is None else generator.get_state())
    return copied


def _forks(loader: DataLoader[Any]) -> bool:
    context: Any = loader.multiprocessing_context or multiprocessing
    # The first start method is the default. Asking for it without `allow_none` would choose it for good.
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return bool(method == "fork")


def _attaches_counts(loader: Any) -> bool:
    return getattr(loader.dataset, "attaches_counts", False)


def _padding_record_of(loader: Any) -> PaddingRecord:
    shard = None if _attaches_counts(loader) else shard_of(loader._index_sampler)
    return {} if shard is None else shard.padding_record


# The last batch


def read_one_ahead(items: Iterator[T], capture: Callable[[], Any] | None) -> Iterator[tuple[T, Any, bool]]:
    """Yields each item with the state of its source and whether it is the last, reading one item ahead."""
    current: Any = next(items, _END)
    while current is not _END:
        state = capture() if capture else None
        upcoming = next(items, _END)
        if capture and upcoming is _END:
            state = capture()
        yield current, state, upcoming is _END
        current = upcoming


def mark_last(loader: Any, source: Iterator[Any], mark: LastMark) -> Iterator[Any]:
    """Yields batches that are read one ahead, and sets the mark at the last one."""
    capture = source_state(loader)
    for batch, state, is_last in read_one_ahead(source, capture):
        if capture:
            keep_source_state(loader, state)
        mark.is_last = is_last
        yield batch


def draw_ahead(indices: Iterator[Any], mark: LastMark) -> Iterator[Any]:
    """Returns indices that are drawn one ahead, which sets the mark at the last one.

    The first indices are drawn at once.

    The batch of the next indices is not read before it is needed, so datasets draw their random numbers in
    the order in which training takes the batches.
    """
    first = next(indices, _END)

    def draw() -> Iterator[Any]:
        current = first
        for upcoming in indices:
            yield current
            current = upcoming
        mark.is_last = True
        yield current

    return iter(()) if first is _END else draw()


def after_first(
    source: Iterator[Any], then: Callable[[], None], kept: int = 0, count: int = 1
) -> Iterator[Any]:
    """Yields a source, and calls a function when its first items after the `kept` ones have been read."""
    yield from islice(source, kept)
    first = list(islice(source, count))
    then()
    yield from first
    yield from source


def read_past(
    source: Iterator[Any], count: int, kept: int = 0, states: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """Reads batches and drops all but the first `kept`, with a progress bar, for data that is read in order.

    The random states are set before the batch after them is read.
    """
    yield from islice(source, kept)
    message = (
        f"{count} batches of an iterable dataset are read and dropped, to continue at the position of the "
        "run. A dataset with `state_dict` and `load_state_dict` continues without reading them."
    )
    for _ in track(range(count - kept), "Skipping batches", message) if count > kept else ():
        if next(source, _END) is _END:
            return
    if states is not None:
        rng.restore(dict(states))
    yield from source


# Moving batches to the device


def choose_move(device: Any, non_blocking: bool, batch: Any) -> Callable[[Any], Any] | None:
    """Returns the function that moves each batch of a pass to a device, or None if batches are there already.

    Args:
        device: Device of the loader; None leaves batches where they are.
        non_blocking: Whether batches are copied asynchronously.
        batch: The first batch, whose memory decides for a device that is the host.
    """
    if device is None:
        return None
    if of_device(torch.device(device)).is_host:
        source = find_device(batch)
        is_needed = source is not None and not of_device(source).is_host
        return partial(send_to_device, device="cpu") if is_needed else None
    observers = run_observers()

    def send(batch: object) -> Any:
        observers.before_move()
        return send_to_device(batch, device, non_blocking=non_blocking)

    return send
