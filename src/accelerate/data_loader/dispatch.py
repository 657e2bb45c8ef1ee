"""Process 0 reads, the others receive their part."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import chain
from typing import Any

import torch

from accelerate.data_loader.background import Draws, ReadAhead
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.dispatch_messages import Arrival, Packed, Sender, receive
from accelerate.data_loader.dispatch_transport import Route
from accelerate.data_loader.late import start_where_saved
from accelerate.data_loader.plan import ShardPlan, data_groups
from accelerate.data_loader.reading import choose_placement, last_remainder
from accelerate.data_loader.rounds import Dealer
from accelerate.devices import of_device
from accelerate.ops import Transport, current_transport
from accelerate.state import GradientState, PartialState


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that only process 0 reads; it sends every process its part of each round.

    Process 0 reads ahead in a thread, unless its dataset draws random numbers in the process itself, and
    sends small batches several at a time.

    A round is one batch for each data-parallel group or, with `split_batches`, one batch cut in parts. The
    last round is cut in equal parts, filled with samples from the beginning. An exception in the dataset is
    raised on every process.

    Args:
        dataset: The dataset; read on process 0 only.
        split_batches: Cut each batch, instead of reading one for each group.
        skip_batches: How many rounds to pass over at the start of each pass.
        use_stateful_dataloader: See `DataLoaderAdapter`.
        slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)` cuts one part; runs on process 0.
        torch_device_mesh: The mesh of the run: ranks that share a batch receive the same part.
        iteration: Number of the first epoch.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    _route: Route | None = None

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
        self._first: list[Any] = []
        self._goes_on_with: list[Any] = []
        self._non_blocking = _non_blocking

        groups, group = data_groups(torch_device_mesh, self.state.num_processes, self.state.process_index)
        self.plan = ShardPlan("dispatch", groups, group, split=split_batches, why="asked for")

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self.state.device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if (rest := start_where_saved(self)) is not None:
            yield from rest
            return
        epoch = self._agree_on_epoch()
        self.begin()
        try:
            transport = current_transport()
            if transport.rank:  # nothing is drawn here
                self.position.begin(self, self.begins_at)()
            place, take = choose_placement(self.device, self._non_blocking), self.batches_in_round
            with closing(self._arrivals(transport)) as arrivals:
                for part, counts, is_last, note in arrivals:
                    self.note_counts(counts, part)
                    if note is not None:
                        self.keep_note(note)
                    if is_last:
                        self.end_of_dataloader = self.position.is_over = True
                        self.remainder = last_remainder(self)
                    self.position.seen += 1
                    self.position.consumed += take
                    yield part if place is None else place(part)
        finally:
            self.end()
            self._advance(epoch)

    @property
    def batches_per_step(self) -> int:
        """How many batches one round takes."""
        return self._dealer().take

    def _dealer(self) -> Dealer:
        plan = self.plan
        return Dealer(plan.groups, self.split_batches, self._drop_last, self.slice_fn)

    def _arrivals(self, transport: Transport) -> Generator[Arrival, None, None]:
        """The batches of this process in one pass."""
        route = self._route_over(transport)
        if transport.rank != 0:
            yield from receive(route)
            return
        sender, group = Sender(route), self.plan.group
        reader: ReadAhead[Packed] | None = None
        try:
            while True:
                try:
                    reader = reader or self._read_ahead(sender)
                    rounds = reader.take()
                except Exception as error:
                    sender.fail(error)
                    raise
                sender.send(rounds)
                for dealt in (one.dealt for one in rounds):
                    yield Arrival(dealt.parts[group], dealt.counts, dealt.is_last, dealt.note)
                if not rounds or rounds[-1].dealt.is_last:
                    return
        finally:
            if reader is not None:
                reader.close()

    def _read_ahead(self, sender: Sender) -> ReadAhead[Packed]:
        """Process 0: start to read the rounds of one pass, and to pack what the others get of them."""
        dealer, draws = self._dealer(), Draws()
        kept = self.batches_kept if self.keeps_first_round else 0
        skipped = self.skip_source + self.skip_batches * dealer.take
        source, _, _ = self._open_batches(skipped, kept, ahead_by=dealer.take)
        given, self._goes_on_with = self._goes_on_with, []
        opening = [] if given else dealer.read(source)
        self._first = given or opening
        batches = draws.watch(source if kept else chain(opening, source))
        rounds = dealer.rounds(batches, self.choose_note(), self._first)
        return ReadAhead(map(sender.pack, rounds), draws.seen, self._enter_thread)

    @property
    def batches_kept(self) -> int:
        """How many batches at the beginning of an epoch a late start reads, to fill the end of the epoch."""
        return 0 if self._drop_last else self._dealer().take

    def _first_round(self) -> list[Any]:
        return self._first

    def _fill_with(self, first: list[Any]) -> None:
        self._goes_on_with = first

    def _enter_thread(self) -> None:
        if not of_device(self.device).is_host:
            self.state.device_backend.set_current(self.device.index or 0)

    def _route_over(self, transport: Transport) -> Route:
        """The way to the other processes; it stays the same from pass to pass."""
        if self._route is None or self._route.transport is not transport:
            self._route = Route(transport, self.groups_of_ranks(), self._block_device())
        return self._route

    def _block_device(self) -> torch.device:
        return self.device if of_device(self.device).is_addressable else torch.device("cpu")

    def __len__(self) -> int:
        rounds, rest = divmod(self._source_length(), self._dealer().take)
        return max(rounds + (rest > 0 and not self._drop_last) - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a round; None where batches have no fixed size."""
        size = getattr(self._index_sampler, "batch_size", None)
        return size if self.split_batches or not size else size * self.plan.groups

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]
