"""Loader that only rank 0 reads, and that sends each rank its part of every global batch.

`prepare_data_loader` returns it with `dispatch_batches=True`, and by default for iterable datasets on several
processes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import chain
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils.data import default_collate

from accelerate.data_loader.background import RandomDrawDetector, ReadAhead
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.dispatch_transport import (
    BatchChannel,
    BatchSender,
    ReceivedBatch,
    SharedMemoryCollate,
    receive_batches,
)
from accelerate.data_loader.global_batches import GlobalBatchBuilder
from accelerate.data_loader.last_batch import last_remainder
from accelerate.data_loader.late_start import make_resumed_loader
from accelerate.data_loader.plan import UNPREPARED, ShardPlan, data_groups
from accelerate.data_loader.reading import (
    OpenPass,
    PassContext,
    choose_move,
    open_batches,
    open_pass,
    read_pass,
)
from accelerate.data_loader.resume import keep_source_state, source_state
from accelerate.data_loader.sample_lists import listed_samples
from accelerate.data_loader.samplers import first_number
from accelerate.devices import of_device
from accelerate.nested import ignorant_find_batch_size
from accelerate.ops import Transport, current_transport
from accelerate.state import GradientState, Observers, PartialState, closed_at_exit, run_observers


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """Loader that only rank 0 reads, and that sends each rank its part of every global batch.

    Rank 0 reads ahead in a thread, unless its dataset draws random numbers in the process itself, and sends
    several small batches in one message.

    A global batch is one batch for each data-parallel group or, with `split_batches`, one batch that is
    split. The last global batch is padded with samples from the beginning of the epoch and split into equal
    parts. If its batches have samples of different shapes, or different values without one row for each
    sample, each group gets a whole batch. An exception of the dataset is raised on every process. On one
    process, `prepare` returns a loader that reads without this thread.

    Args:
        dataset: The dataset; read on rank 0 only.
        split_batches: Whether to split each batch, instead of reading one batch for each group.
        skip_batches: Number of steps to skip at the start of each pass.
        use_stateful_dataloader: See `DataLoaderAdapter`.
        slice_fn: Function that cuts one part, called as `slice_fn(batch, slice, process_index=,
            num_processes=)` on rank 0.
        torch_device_mesh: The mesh of the run: ranks that get the same batch receive the same part.
        iteration: Number of the first epoch.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    _channel: BatchChannel | None = None  # not copied with the loader

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Any = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        self.state = PartialState()
        if "_plan" not in kwargs:
            groups = data_groups(torch_device_mesh, self.state.num_processes, self.state.process_index)
            kwargs["_plan"] = ShardPlan("dispatch", *groups, split=split_batches, reason=UNPREPARED.reason)
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self.state.device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return read_pass(self) if self.plan.mode == "unsharded" else self._read_parts()

    def begin_pass(self) -> Any:
        """Begins a pass, and returns the loader that makes it, which is this one or a late start of it."""
        late = make_resumed_loader(self)
        return self if late is None else late

    def open_pass(self, wrap: None) -> OpenPass:
        """Opens a pass that no other process reads."""
        skipped = self.skip_batches + self.start.skip_source
        return open_pass(self, skipped, first_number(self._index_sampler) + skipped)

    @closed_at_exit
    def _read_parts(self) -> Generator[Any, None, None]:
        """Makes one pass over the parts of this process, on its device."""
        loader, observers = self.begin_pass(), run_observers()
        observers.pass_begun(loader)
        try:
            yield from loader._own_parts(current_transport(), observers)
        finally:
            loader.latest_batch = None
            observers.pass_ended(loader)

    def _own_parts(self, transport: Transport, observers: Observers) -> Iterator[Any]:
        """Yields the part of this process of each global batch, on its device."""
        with PassContext(self), closing(self._receive_own(transport)) as received:
            if transport.rank:  # no order is drawn here
                order_is_drawn = self.tracker.begin(self, self.start.position)
                self._draw_base_seed()
                order_is_drawn()
            self.tracker.batches_per_step = self.plan.batches_per_step
            move, is_first = None, True
            for batch in received:
                self._record(batch)
                if is_first:
                    move, is_first = choose_move(self.device, self._non_blocking, batch.part), False
                part = batch.part if move is None else move(batch.part)
                observers.batch_read(self.batch_rows or 0)
                self.latest_batch, self.read_at = part, perf_counter_ns()
                yield part
                self.latest_batch = None
                observers.before_read(self)

    def _draw_base_seed(self) -> None:
        """Draws the seed that torch's iterator draws on rank 0, so that all generators stay equal.

        A run draws the seed of persistent workers once, as in `settings_of_workers`.
        """
        if self.num_workers and self.tracker.workers_epoch is not None:
            return
        if self.persistent_workers:
            self.tracker.workers_epoch = self.iteration
        if not self.start.position.is_over:
            torch.empty((), dtype=torch.int64).random_(generator=self.base_dataloader.generator)

    def _record(self, batch: ReceivedBatch) -> None:
        """Sets the attributes of the loader for a batch."""
        samples = listed_samples(batch.part, self.full_rows)
        self.set_counts(batch.counts, samples or ignorant_find_batch_size(batch.part))
        if batch.state is not None:
            keep_source_state(self, batch.state)
        if batch.is_last:
            self.end_of_dataloader = True
            self.remainder = last_remainder(self)
        self.tracker.seen += 1
        self.tracker.is_over = batch.is_last

    def _builder(self) -> GlobalBatchBuilder:
        groups, split = self.plan.groups, self.split_batches
        return GlobalBatchBuilder(groups, split, self._drop_last, self.slice_fn, self.nominal_rows)

    def _receive_own(self, transport: Transport) -> Generator[ReceivedBatch, None, None]:
        """Yields the batches of this process, which rank 0 reads and sends."""
        if self._channel is None or self._channel.transport is not transport:
            device = self.device if of_device(self.device).is_addressable else torch.device("cpu")
            self._channel = BatchChannel(transport, self.groups_of_ranks(), device)
        channel = self._channel
        is_collated_in_memory = self.shared_memory_collate is not None
        if transport.rank != 0:
            yield from receive_batches(channel)
            return
        sender, group = BatchSender(channel), self.plan.group
        reader: ReadAhead | None = None
        try:
            while True:
                try:
                    reader = reader or self._read_ahead(sender)
                    packed = reader.take()
                except Exception as error:
                    sender.fail(error)
                    raise
                sender.send(packed)
                for batch in (item.batch for item in packed):
                    part = batch.parts[group]
                    part = channel.keep(part) if is_collated_in_memory else part
                    yield ReceivedBatch(part, batch.counts, batch.is_last, batch.state)
                if not packed or packed[-1].batch.is_last:
                    return
        finally:
            if reader is not None:
                reader.close()

    @property
    def shared_memory_collate(self) -> SharedMemoryCollate | None:
        """The function that replaces torch's default collate function in this process, which saves a copy."""
        channel = self._channel
        if channel is None or self.num_workers or self.collate_fn is not default_collate:
            return None
        return SharedMemoryCollate(channel, self.plan.group, self._builder().num_batches)

    def _read_ahead(self, sender: BatchSender) -> ReadAhead:
        """Starts to read the global batches of one pass, and to pack the parts of the other ranks."""
        builder, detector, start = self._builder(), RandomDrawDetector(), self.start
        kept = self.num_padding_batches if start.keeps_padding_source else 0
        skipped = start.skip_source + self.skip_batches * builder.num_batches
        source, _, _ = open_batches(self, skipped, kept, ahead_by=builder.num_batches)
        restored = self.padding_source.take_restored()
        opening = [] if restored else builder.read(source)
        self.padding_source.items = restored or opening
        batches = detector.watch(source if kept else chain(opening, source))
        global_batches = builder.build(batches, source_state(self), self.padding_source.items)
        return ReadAhead(map(sender.pack, global_batches), detector.has_drawn, self._enter_thread)

    def _enter_thread(self) -> None:
        if not of_device(self.device).is_host:
            self.state.device_backend.set_current(self.device.index or 0)

    def __len__(self) -> int:
        if self.start.position.is_over:
            return 0
        batches = max(len(self.base_dataloader) - self.start.skip_source, 0)
        steps, rest = divmod(batches, self._builder().num_batches)
        return max(steps + (rest > 0 and not self._drop_last) - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in a global batch, or None if batches have no fixed size."""
        size = getattr(self._index_sampler, "batch_size", None)
        return size if self.split_batches or not size else size * self.plan.groups
