"""The prepared loaders: each process reads its own shard, or process 0 reads for all and sends the parts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from accelerate import torch_private
from accelerate.base import PreparationError, RNGType
from accelerate.data_loader.background import Draws, ReadAhead
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin, Pass, kept_settings
from accelerate.data_loader.dispatch_transport import (
    Arrival,
    Round,
    Route,
    Sender,
    StackInMemory,
    receive,
)
from accelerate.data_loader.joining import Join
from accelerate.data_loader.last_batch import (
    Fillers,
    count_samples,
    cut_batch,
    first_samples,
    full_rows,
    join,
    last_remainder,
    real_per_part,
)
from accelerate.data_loader.plan import BY_HAND, ShardPlan, data_groups
from accelerate.data_loader.reading import (
    IteratorWrapper,
    choose_move,
    one_ahead,
    open_batches,
    open_pass,
    read_past,
    yield_batches,
)
from accelerate.data_loader.resume import keep_source_state, source_state, start_where_saved
from accelerate.data_loader.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SamplerShard,
    first_number,
    shard_of,
)
from accelerate.devices import of_device, upload_options
from accelerate.monitoring import DATA
from accelerate.nested import ignorant_find_batch_size
from accelerate.ops import Transport, current_transport
from accelerate.rng import synchronize_rng_states
from accelerate.state import GradientState, PartialState, closed_at_exit, step_clock

_END = object()


@dataclass(frozen=True)
class RoundBuilder:
    """Builds rounds of one part for each group; the last one is filled from the beginning of the epoch."""

    groups: int
    split: bool = False  # cut each batch in `groups` parts, instead of one batch for each group
    drop_last: bool = False  # drop a last round that has not a batch for each group
    cut: Callable[..., Any] | None = None  # the user's `slice_fn`; None cuts tensors and lists
    nominal_rows: int | None = None  # the declared batch size of one group

    @property
    def take(self) -> int:
        """How many batches one round takes."""
        return 1 if self.split else self.groups

    def rounds(
        self, batches: Iterator[Any], capture: Callable[[], Any] | None = None, first: list[Any] | None = None
    ) -> Iterator[Round]:
        """Yield rounds until there are no batches left, reading one round ahead.

        `capture` returns the state of the source, and `first` is the first round of the epoch, where these
        batches begin later.
        """
        for current, state, is_last in one_ahead(iter(lambda: self.read(batches), []), capture):
            first = first or current
            yield replace(self._share(current, first, is_last=is_last), state=state)

    def read(self, batches: Iterator[Any]) -> list[Any]:
        read = list(islice(batches, self.take))
        return [] if self.drop_last and len(read) < self.take else read

    def _share(self, batches: list[Any], first: list[Any], *, is_last: bool) -> Round:
        sizes = [count_samples(batch) for batch in batches]
        is_even_end = len(batches) == self.groups and len(set(sizes)) == 1
        if not self.split and self.cut is None and (is_even_end or not is_last):
            counts = [size for size in sizes if size is not None]
            is_uneven = len(set(sizes)) > 1 or self._is_short(max(counts, default=0), batches, first)
            return Round(batches, is_last, tuple(counts) if is_uneven and len(counts) == len(sizes) else None)
        whole = join(batches)
        samples = count_samples(whole)
        if samples is None:
            raise PreparationError(
                f"A batch of type {type(whole).__name__} cannot be cut for {self.groups} processes. Give "
                "slice_fn_for_dispatch, or set drop_last=True, or dispatch_batches=False."
            )
        part = -(-samples // self.groups)
        missing = part * self.groups - samples
        if missing:
            whole = join([whole, *first_samples(first, missing)])
        parts = []
        for group in range(self.groups):
            span = slice(group * part, (group + 1) * part)
            if self.cut is None:
                parts.append(cut_batch(whole, span, samples + missing))
            else:
                parts.append(self.cut(whole, span, process_index=group, num_processes=self.groups))
        real = tuple(real_per_part(samples, part, self.groups))
        return Round(parts, is_last, real if missing or self._is_short(part, batches, first) else None)

    def _is_short(self, rows: int, batches: list[Any], first: list[Any]) -> bool:
        """Whether parts of this many rows are smaller than those of a full round."""
        sizes = [size for size in map(count_samples, first) if size is not None]
        if not sizes:
            return False
        whole = -(-sizes[0] // self.groups) if self.split else max(sizes)
        return rows < full_rows(self.nominal_rows, whole, is_only=batches[0] is first[0])


def _read_alone(loader: Any, move: Callable[[Any], Any] | None) -> Iterator[Any]:
    """Make one pass over a loader that no other process reads."""
    with Pass(loader):
        skipped = loader.skip_batches + loader.start.skip_source
        batches, fillers = open_pass(loader, skipped)
        number = first_number(loader._index_sampler) + skipped
        yield from yield_batches(loader, batches, fillers, number, move)


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that only process 0 reads; it sends every process its part of each round.

    Process 0 reads ahead in a thread, unless its dataset draws random numbers in the process itself, and
    sends several small batches in one message.

    A round is one batch for each data-parallel group or, with `split_batches`, one batch cut in parts. The
    last round is cut in equal parts, filled with samples from the beginning. An exception in the dataset is
    raised on every process. On one process `prepare` returns one that reads without this thread.

    Args:
        dataset: The dataset; read on process 0 only.
        split_batches: Cut each batch, instead of reading one for each group.
        skip_batches: How many rounds to skip at the start of each pass.
        use_stateful_dataloader: See `DataLoaderAdapter`.
        slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)` cuts one part; runs on process 0.
        torch_device_mesh: The mesh of the run: ranks that share a batch receive the same part.
        iteration: Number of the first epoch.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    _route: Route | None = None  # not copied with the loader

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
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self.state = PartialState()
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking

        groups, group = data_groups(torch_device_mesh, self.state.num_processes, self.state.process_index)
        self.plan = ShardPlan("dispatch", groups, group, split=split_batches, why=BY_HAND.why)

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self.state.device

    @closed_at_exit
    def __iter__(self) -> Generator[Any, None, None]:  # type: ignore[override]
        if (late := start_where_saved(self)) is not None:
            yield from late
            return
        if self.plan.how == "leave":
            yield from _read_alone(self, choose_move(self.device, self._non_blocking))
            return
        begin = step_clock.begin_pass(self.num_workers)
        try:
            for batch in self._parts(current_transport()):
                step_clock.begin_forward(ignorant_find_batch_size(batch) or 0)
                yield batch
                step_clock.switch(DATA)
        finally:
            step_clock.end_pass(begin)

    def _parts(self, transport: Transport) -> Iterator[Any]:
        """Yield the part of this process of each round, on its device."""
        with Pass(self), closing(self._arrivals(transport)) as arrivals:
            if transport.rank:  # no order is drawn here
                order_is_drawn = self.position.begin(self, self.start.offset)
                self._draw_base_seed()
                order_is_drawn()
            move = choose_move(self.device, self._non_blocking)
            for arrival in arrivals:
                self._describe(arrival)
                yield arrival.part if move is None else move(arrival.part)

    def _draw_base_seed(self) -> None:
        """Draw the seed that torch's iterator draws on rank 0: equal generators stay equal on all ranks.

        A run draws the seed of persistent workers once, as in `settings_of_workers`.
        """
        position = self.position
        if self.num_workers and position.workers_epoch is not None:
            return
        if self.persistent_workers:
            position.workers_epoch = self.iteration
        if not self.start.is_over:
            torch.empty((), dtype=torch.int64).random_(generator=self.base_dataloader.generator)

    def _describe(self, arrival: Arrival) -> None:
        self.note_counts(arrival.counts, ignorant_find_batch_size(arrival.part))
        if arrival.state is not None:
            keep_source_state(self, arrival.state)
        if arrival.is_last:
            self.end_of_dataloader = self.position.is_over = True
            self.remainder = last_remainder(self)
        self.position.advance(self.plan.batches_in_round)

    def _builder(self) -> RoundBuilder:
        groups, split = self.plan.groups, self.split_batches
        return RoundBuilder(groups, split, self._drop_last, self.slice_fn, self.nominal_rows)

    def _arrivals(self, transport: Transport) -> Generator[Arrival, None, None]:
        route = self._route_over(transport)
        is_stacked = self.collate_in_memory is not None
        if transport.rank != 0:
            yield from receive(route)
            return
        sender, group = Sender(route), self.plan.group
        reader: ReadAhead | None = None
        try:
            while True:
                try:
                    reader = reader or self._read_ahead(sender)
                    rounds = reader.take()
                except Exception as error:
                    sender.fail(error)
                    raise
                sender.send(rounds)
                for one in (packed.round for packed in rounds):
                    part = route.keep(one.parts[group]) if is_stacked else one.parts[group]
                    yield Arrival(part, one.counts, one.is_last, one.state)
                if not rounds or rounds[-1].round.is_last:
                    return
        finally:
            if reader is not None:
                reader.close()

    @property
    def collate_in_memory(self) -> StackInMemory | None:
        """What replaces torch's default collate function where this process calls it: it saves a copy."""
        route = self._route
        if route is None or self.num_workers or self.collate_fn is not default_collate:
            return None
        return StackInMemory(route, self.plan.group, self._builder().take)

    def _read_ahead(self, sender: Sender) -> ReadAhead:
        """Process 0: start to read the rounds of one pass, and to pack what the others get of them."""
        builder, draws, start = self._builder(), Draws(), self.start
        kept = self.batches_kept if start.keeps_first_round else 0
        skipped = start.skip_source + self.skip_batches * builder.take
        source, _, _ = open_batches(self, skipped, kept, ahead_by=builder.take)
        restored = self.first_round.take_restored()
        opening = [] if restored else builder.read(source)
        self.first_round.items = restored or opening
        batches = draws.watch(source if kept else chain(opening, source))
        rounds = builder.rounds(batches, source_state(self), self.first_round.items)
        return ReadAhead(map(sender.pack, rounds), draws.seen, self._enter_thread)

    def _enter_thread(self) -> None:
        if not of_device(self.device).is_host:
            self.state.device_backend.set_current(self.device.index or 0)

    def _route_over(self, transport: Transport) -> Route:
        """The route to the other processes; one for all passes."""
        if self._route is None or self._route.transport is not transport:
            device = self.device if of_device(self.device).is_addressable else torch.device("cpu")
            self._route = Route(transport, self.groups_of_ranks(), device)
        return self._route

    def __len__(self) -> int:
        if self.start.is_over:
            return 0
        batches = max(len(self.base_dataloader) - self.start.skip_source, 0)
        rounds, rest = divmod(batches, self._builder().take)
        return max(rounds + (rest > 0 and not self._drop_last) - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a round; None where batches have no fixed size."""
        size = getattr(self._index_sampler, "batch_size", None)
        return size if self.split_batches or not size else size * self.plan.groups


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader whose samplers, or dataset, already give this process its shard only.

    At each new pass it synchronizes the random generators of all processes, so that shuffles agree; it
    moves batches to the device and knows which batch is the last.

    Args:
        dataset: The dataset, sharded where it is iterable.
        device: Where batches go; None leaves them.
        rng_types: Generators to synchronize at each pass: "torch", "cuda", "xla", "generator", ...
        synchronized_generator: The one meant by "generator".
        skip_batches: How many batches to skip at the start of each pass.
        use_stateful_dataloader: See `DataLoaderAdapter`.
        torch_device_mesh: The mesh of the run.
        iteration: Number of the first epoch.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: Any = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self.iteration = iteration
        self.torch_device_mesh = torch_device_mesh
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.deals_ready_batches = self.counts_batches and isinstance(self.sampler, SamplerShard)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.read_through(None)

    @closed_at_exit
    def read_through(self, wrap: IteratorWrapper | None) -> Generator[Any, None, None]:
        """Make one pass over the batches, which come from torch's iterator, or through what wraps it."""
        if (late := start_where_saved(self)) is not None:
            yield from late.read_through(wrap)
            return
        self._synchronize_generators()
        with Pass(self):
            skipped = self.skip_batches + self.start.skip_source
            number = first_number(self._index_sampler) + skipped
            if self.plan.how == "dataset_shards":
                batches, fillers = self._open_own_share(number)
            else:
                batches, fillers = open_pass(self, skipped, wrap)
            move = choose_move(self.device, self._non_blocking)
            yield from yield_batches(self, batches, fillers, number, move)

    def _open_own_share(self, number: int) -> tuple[Iterator[tuple[Any, bool]], Fillers]:
        """Start a pass over a shard that the dataset makes, and whose length other ranks do not know."""
        kept = self.batches_kept if self.start.keeps_first_round else 0
        stream = None if self.position.resume_point is None else self.start.offset.stream
        ended = stream if stream is not None and stream.get("ended") else None
        source, _, fillers = open_batches(self, self.skip_batches, kept)
        restored = self.first_round.take_restored()
        self.first_round.items = list(islice(source, kept)) or restored
        if ended is not None:
            next(source, None)
        join = Join(
            current_transport(),
            self.groups_of_ranks(),
            self.first_round,
            fills_short=self.batch_sampler is not None,
            drop_last=self._drop_last,
        )
        capture = source_state(self)
        return join.take(source, capture, self._keep_share_state, number, fillers, ended), fillers

    def _keep_share_state(self, state: Any, ended: bool) -> None:
        if state is not None:  # captured before the first round was read, perhaps
            state = {**state, "first": self.first_round.items, "ended": ended}
        keep_source_state(self, state)

    def _synchronize_generators(self) -> None:
        if self.position.resume_point is not None:  # the states of the checkpoint are set instead
            return
        types = self.rng_types
        if types is not None and self.synchronized_generator is None:
            types = [kind for kind in types if RNGType(kind) != RNGType.GENERATOR]
        if types:
            synchronize_rng_states(types, self.synchronized_generator)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch over all processes; None where batches have no fixed size."""
        shard = shard_of(self._index_sampler)
        size: int | None = getattr(self._index_sampler, "batch_size", None)
        if isinstance(shard, BatchSamplerShard):
            return size if shard.split_batches or not size else size * shard.num_processes
        if self.plan.own_shares:
            return size and size * self.plan.groups
        if isinstance(self.dataset, IterableDatasetShard) and size:
            return size * self.dataset.num_processes
        return None if isinstance(shard, SamplerShard) else size


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that reads its first batches and drops them: for data that can only be read in order.

    Args:
        dataset: The dataset.
        skip_batches: How many batches to skip at the start of each pass.
        use_stateful_dataloader: Read by torchdata's `StatefulDataLoader`. A restored position counts the
            skipped batches, so that a pass that resumes skips none twice.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    reads_in_order = True

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()

    @classmethod
    def from_plain(cls, loader: DataLoader[Any], skip_batches: int) -> SkipDataLoader:
        """Build one that reads what a torch loader over iterable data reads."""
        sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return cls(loader.dataset, skip_batches, **sizes, **kept_settings(loader))

    @closed_at_exit
    def __iter__(self) -> Generator[Any, None, None]:  # type: ignore[override]
        with Pass(self):
            batches, fillers = open_pass(self, 0)
            restored = torch_private.count_yielded(self.base_dataloader) if self.torchdata_resumes else 0
            rest = read_past(batches, max(self.skip_batches - restored, 0))
            yield from yield_batches(self, rest, fillers, self.skip_batches, None)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch; None where batches have no fixed size."""
        return self.batch_size


@cache
def wrapper_for_xla() -> type:
    """Build the class `MpDeviceLoaderWrapper` on torch_xla's loader; needs torch_xla."""
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    class MpDeviceLoaderWrapper(MpDeviceLoader):  # type: ignore[misc]
        """A prepared loader whose batches torch_xla moves to the device in the background.

        Args:
            dataloader: A prepared loader that leaves batches on the CPU.
            device: The XLA device.
        """

        def __init__(self, dataloader: DataLoaderShard, device: Any) -> None:
            super().__init__(dataloader, device)
            self.dataloader = dataloader
            self.target = device

        def __iter__(self) -> Iterator[Any]:
            options = upload_options()
            return self.dataloader.read_through(
                lambda source: iter(MpDeviceLoader(source, self.target, **options))
            )

        def __len__(self) -> int:
            return len(self.dataloader)

        def __getattr__(self, name: str) -> Any:
            if name == "dataloader":  # missing while it is unpickled
                raise AttributeError(name)
            return getattr(self.dataloader, name)

    return MpDeviceLoaderWrapper
