"""Read batches through torch's iterator: open it, recognise the last batch, move each batch to the device."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import rng, torch_private
from accelerate.base import stack_dumps
from accelerate.data_loader.background import Draws
from accelerate.data_loader.last_batch import (
    CountingCollate,
    Fillers,
    full_rows,
    in_samples,
    last_remainder,
    rows_per_sample,
    untagged,
)
from accelerate.data_loader.plan import BY_HAND
from accelerate.data_loader.resume import (
    Position,
    keep_source_state,
    restore_start,
    restore_stream,
    source_state,
)
from accelerate.data_loader.samplers import shard_of
from accelerate.devices import of_device
from accelerate.display import track
from accelerate.monitoring import DATA, MOVING
from accelerate.nested import find_device, ignorant_find_batch_size, send_to_device
from accelerate.state import services, step_clock

_END = object()
T = TypeVar("T")
_GOLDEN = 0x9E3779B97F4A7C15  # odd and without pattern: seeds of neighbouring groups share no bits

IteratorWrapper = Callable[[Iterator[Any]], Iterator[Any]]
"""Takes torch's iterator and yields its batches, such as a loader that moves them in the background."""


class WorkersObserver:
    """Observes worker processes from their start: a service of the run."""

    def follow(self, iterator: Any) -> None:
        """Observe workers; called by the thread that will wait for them."""


def yield_batches(
    loader: Any,
    batches: Iterator[tuple[Any, bool]],
    fillers: Fillers,
    number: int,
    move: Callable[[Any], Any] | None,
) -> Iterator[Any]:
    """Yield batches, with the attributes of the loader set for each; `fillers` may grow meanwhile."""
    position, batches_in_round = loader.position, loader.plan.batches_in_round
    reads_all = loader.plan.how == "leave" and loader.plan != BY_HAND
    full: int | None = None
    is_first = True
    begin = step_clock.begin_pass(loader.num_workers)
    try:
        for current, is_last in batches:
            rows = ignorant_find_batch_size(current)
            counts = in_samples(fillers.get(number), loader, current) if fillers else None
            if rows is not None and reads_all:
                full = full_rows(loader.nominal_rows, rows, is_only=is_last) if full is None else full
                counts = (rows,) if rows < full else None
            if is_first and not is_last and counts is None and loader.has_fixed_batches:
                loader.rows_per_sample = rows_per_sample(rows, loader.nominal_rows)
            is_first = False
            loader.note_counts(counts, rows)
            if is_last:
                loader.end_of_dataloader = position.is_over = True
                loader.remainder = last_remainder(loader)
            position.advance(batches_in_round)
            if move is not None:
                current = move(current)
            step_clock.begin_forward(rows or 0)
            yield current
            step_clock.switch(DATA)
            number += 1
    finally:
        step_clock.end_pass(begin)


def open_pass(
    loader: Any, skip: int, wrap: IteratorWrapper | None = None
) -> tuple[Iterator[tuple[Any, bool]], Fillers]:
    """Start a pass: its batches, each with whether it is the last one, and the record of their filler."""
    source, indices, fillers = open_batches(loader, skip)
    if indices is not None and wrap is None:
        return indices.mark_last(source), fillers
    return mark_last(loader, source if wrap is None else wrap(source)), fillers


def open_batches(
    loader: Any, skip: int, kept: int = 0, ahead_by: int | None = None
) -> tuple[Iterator[Any], IndexAhead | None, Fillers]:
    """Open torch's iterator; the order of the pass is drawn here.

    The first `kept` of the skipped batches are yielded nevertheless. `ahead_by` batches are read before the
    one that is yielded; None: as torch does. Also returns the indices of the batches, where those are drawn
    in this process, and the record of filler.
    """
    position, start = loader.position, loader.start
    restore_stream(loader)
    if start.is_over:
        position.end_resumed(start.offset, loader)
        return iter(()), None, {}
    point = position.resume_point
    by_torchdata = point is not None and point.by_torchdata and start.origin is None
    order_is_drawn = position.begin(loader, point.offset if by_torchdata else start.offset)
    source: Any = open_iterator(loader)
    loader.iterator = source
    if position.stream_may_be_over:
        position.stream_may_be_over = False
        source = again_if_empty(source, loader)
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    if type(source) is torch_private.SingleProcessIterator and is_map_style and not skip:
        indices = torch_private.wrap_indices(source, IndexAhead)
        fillers = _fillers_of(loader)
        if ahead_by is not None:
            return after_first(source, order_is_drawn, kept, ahead_by), None, fillers
        order_is_drawn()
        return source, indices, fillers
    fillers = _fillers_of(loader)
    if _is_tagged(loader):
        source = untagged(source, fillers)
    is_resumed = point is not None and position.offset.seen == point.offset.seen
    read_states = point.read_states if point is not None and is_resumed else None
    if skip or read_states is not None:
        source = read_past(source, skip, kept, read_states)
    source = after_first(source, order_is_drawn, kept, ahead_by or 1)
    if ahead_by is None and not loader.num_workers:
        source = watch_draws(source, position)
    return source, None, fillers


def watch_draws(source: Iterator[Any], position: Position) -> Iterator[Any]:
    """Yield batches that are read one ahead; keep the random states in front of each in `position`.

    A pass whose second batch draws no random numbers in this process is read without.
    """
    yield from islice(source, 1)
    draws, draws_any = Draws(), None
    while draws_any is not False:
        before = draws.begin()
        if (batch := next(source, _END)) is _END:
            return
        draws_any = draws.seen() if draws_any is None else draws_any
        position.read_states = before if draws_any else None
        yield batch
    yield from source


def again_if_empty(source: Iterator[Any], loader: Any) -> Iterator[Any]:
    """Yield the batches of a source or, without any, those of a new iterator of the loader: the dataset has
    its state from the end of an epoch, from which some begin the next epoch and others are at their end."""
    first = next(source, _END)
    if first is _END:
        restore_start(loader)
        source = loader.iterator = open_iterator(loader)
    else:
        yield first
    yield from source


def open_iterator(loader: Any) -> Iterator[Any]:
    base: DataLoader[Any] = loader.base_dataloader
    if base.persistent_workers and base._iterator is not None:
        return iter(base)
    position, epoch = loader.position, loader.iteration
    with settings_of_workers(loader), dataset_at(loader, position.workers_epoch):
        iterator = iter(base)
    if base.persistent_workers and position.workers_epoch is None:
        position.workers_epoch = epoch
    if base.num_workers:
        services.get(WorkersObserver, WorkersObserver).follow(iterator)
    return iterator


@contextmanager
def dataset_at(loader: Any, epoch: int | None) -> Iterator[None]:
    """Set the epoch of the dataset that new workers copy; None: that of the pass.

    Persistent workers keep the copy of the dataset that they began with, so those that replace them after a
    checkpoint was loaded begin with the same.
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
    """Change three settings of the torch loader while it makes an iterator, which reads them.

    Filler is counted by the collate function, groups draw different seeds for their workers, and workers
    write their stacks when asked. A run draws the seed of persistent workers once: for those that replace
    them after a checkpoint was loaded, it is drawn from a copy of the generator.
    """
    base = loader.base_dataloader
    has_drawn = loader.position.workers_epoch is not None
    settings = {name: getattr(base, name) for name in ("collate_fn", "generator", "worker_init_fn")}
    if _is_tagged(loader):
        base.collate_fn = CountingCollate(base.collate_fn)
    elif (collate := getattr(loader, "collate_in_memory", None)) is not None:
        base.collate_fn = collate
    if base.num_workers and (loader.plan.group or has_drawn):
        source = copy_generator(base.generator) if has_drawn else base.generator
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
        base.generator = torch.Generator().manual_seed((drawn + loader.plan.group * _GOLDEN) % 2**64)
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
    """Return a generator in the same state; None: that of torch."""
    copied = torch.Generator()
    copied.set_state(torch.get_rng_state() if generator is None else generator.get_state())
    return copied


def _forks(loader: DataLoader[Any]) -> bool:
    context: Any = loader.multiprocessing_context or multiprocessing
    # The first of all is the one that is used when none was chosen; to ask otherwise chooses it for good.
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return bool(method == "fork")


def _is_tagged(loader: Any) -> bool:
    return getattr(loader.dataset, "tagged", False)


def _fillers_of(loader: Any) -> Fillers:
    shard = None if _is_tagged(loader) else shard_of(loader._index_sampler)
    return {} if shard is None else shard.fillers


def one_ahead(items: Iterator[T], capture: Callable[[], Any] | None) -> Iterator[tuple[T, Any, bool]]:
    """Yield each item with the state of its source behind it, and whether it is the last; reads one ahead."""
    current: Any = next(items, _END)
    while current is not _END:
        state = capture() if capture else None
        upcoming = next(items, _END)
        if capture and upcoming is _END:
            state = capture()
        yield current, state, upcoming is _END
        current = upcoming


def mark_last(loader: Any, source: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each batch with whether it is the last one, which is known when the next one was read."""
    capture = source_state(loader)
    for batch, state, is_last in one_ahead(source, capture):
        if capture:
            keep_source_state(loader, state)
        yield batch, is_last


class IndexAhead:
    """The indices of the batches, drawn one ahead: whether there is one more is known without reading it.

    Nothing is read before it is needed, so random numbers that a dataset draws come in the order in which
    training takes the batches.
    """

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices
        self._upcoming = next(indices, _END)

    def __iter__(self) -> IndexAhead:
        return self

    def __next__(self) -> Any:
        current = self._upcoming
        if current is _END:
            raise StopIteration
        self._upcoming = next(self._indices, _END)
        return current

    def mark_last(self, source: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield each batch that is read by these indices with whether it is the last one."""
        return ((batch, self._upcoming is _END) for batch in source)


def after_first(
    source: Iterator[Any], then: Callable[[], None], kept: int = 0, count: int = 1
) -> Iterator[Any]:
    """Yield a source, and call a function when its first items behind the `kept` ones have been read."""
    yield from islice(source, kept)
    first = list(islice(source, count))
    then()
    yield from first
    yield from source


def read_past(
    source: Iterator[Any], count: int, kept: int = 0, states: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """Read batches and drop all but the first `kept`, with a progress bar, for data that is read in order;
    the batch behind them is read with these random states."""
    yield from islice(source, kept)
    message = (
        f"{count} batches of an iterable dataset are read and thrown away, to go on where the run was. A "
        "dataset with `state_dict` and `load_state_dict` goes on at once."
    )
    for _ in track(range(count - kept), "Skipping batches", message) if count > kept else ():
        if next(source, _END) is _END:
            return
    if states is not None:
        rng.restore(dict(states))
    yield from source


def choose_move(device: Any, non_blocking: bool) -> Callable[[Any], Any] | None:
    """Return what moves each batch of a pass to a device; decided once for the pass."""
    if device is None:
        return None
    if not of_device(torch.device(device)).is_host:

        def send(batch: Any) -> Any:
            step_clock.switch(MOVING)
            return send_to_device(batch, device, non_blocking=non_blocking)

        return send
    is_needed: bool | None = None  # batches come from CPU memory as a rule: the first one decides

    def move(batch: Any) -> Any:
        nonlocal is_needed
        if is_needed is None:
            own = find_device(batch)
            is_needed = own is not None and not of_device(own).is_host
        return send_to_device(batch, "cpu") if is_needed else batch

    return move
