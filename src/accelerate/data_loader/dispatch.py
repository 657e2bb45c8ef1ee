"""Process 0 reads, the others receive their part."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.packing import Failure, Header, pack, unpack
from accelerate.data_loader.plan import ShardPlan, data_groups
from accelerate.data_loader.reading import choose_placement, last_remainder, length_of, weigh
from accelerate.data_loader.rounds import Dealer, Round
from accelerate.data_loader.validity import real_per_part
from accelerate.ops.transport import Transport, current_transport
from accelerate.state import GradientState, PartialState

_UNADDRESSED = frozenset(
    {"xla", "neuron"}
)  # devices whose tensors are no stretch of bytes that can be viewed


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that only process 0 reads; it sends every process its part of each round.

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
        self.plan = ShardPlan("dispatch", groups, group, split=split_batches, why="asked for")

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self.state.device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch = self._agree_on_epoch()
        self.begin()
        try:
            transport = current_transport()
            arrivals = self._send(transport) if transport.rank == 0 else self._receive(transport)
            place, group = choose_placement(self.device, self._non_blocking), self.plan.group
            for part, header in arrivals:
                self.note_counts(weigh(header.counts, self, part), part)
                if header.ends[group]:
                    self.end_of_dataloader = True
                    self.remainder = last_remainder(self)
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
        return Dealer(plan.groups, self.split_batches, plan.even, self._drop_last, self.slice_fn)

    def _rounds(self) -> Iterator[Round]:
        """Process 0: read the rounds of one pass."""
        dealer = self._dealer()
        source, _ = self._open_source()
        if self.skip_batches:
            source = islice(source, self.skip_batches * dealer.take, None)
        note = self._update_state_dict if self.use_stateful_dataloader else _nothing
        return dealer.rounds(source, note)

    def _send(self, transport: Transport) -> Iterator[tuple[Any, Header]]:
        """Process 0: read, send each round, and keep the own part."""
        device, group = self._block_device(), self.plan.group
        rounds: Iterator[Round] | None = None
        while True:
            try:
                rounds = rounds or self._rounds()
                dealt = next(rounds, None)
                header, block = (None, None) if dealt is None else pack(dealt, device)
                packed = pickle.dumps(header)
            except Exception as error:
                transport.broadcast_object(pickle.dumps(Failure.of(error)), 0)
                raise
            transport.broadcast_object(packed, 0)
            if dealt is None or header is None or block is None:
                return
            if block.numel():
                transport.broadcast(block, 0)
            if dealt.parts[group] is not None:
                yield dealt.parts[group], header

    def _receive(self, transport: Transport) -> Iterator[tuple[Any, Header]]:
        """The other processes: take the own part out of each round."""
        device, group = self._block_device(), self.plan.group
        while (header := pickle.loads(transport.broadcast_object(None, 0))) is not None:
            if isinstance(header, Failure):
                header.raise_here()
            block = torch.empty(header.starts[-1], dtype=torch.uint8, device=device)
            if block.numel():
                transport.broadcast(block, 0)
            part = unpack(header, group, block)
            if part is not None:
                yield part, header

    def _block_device(self) -> torch.device:
        return torch.device("cpu") if self.device.type in _UNADDRESSED else self.device

    def __len__(self) -> int:
        batches, groups = self._source_length(), self.plan.groups
        if self.split_batches:
            return max(batches - self._gets_nothing_of_the_last(batches) - self.skip_batches, 0)
        rounds, rest = divmod(batches, groups)
        if not self._drop_last:
            rounds += rest > (0 if self.plan.even else self.plan.group)
        return max(rounds - self.skip_batches, 0)

    def _gets_nothing_of_the_last(self, batches: int) -> bool:
        size, sampler = getattr(self._index_sampler, "batch_size", None), self.get_sampler()
        samples = length_of(sampler if length_of(sampler) is not None else self.dataset)
        if self.plan.even or self._drop_last or not size or samples is None:
            return False
        last, groups = samples - (batches - 1) * size, self.plan.groups
        return not real_per_part(last, -(-last // groups), groups)[self.plan.group]

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a round; None where batches have no fixed size."""
        size = getattr(self._index_sampler, "batch_size", None)
        return size if self.split_batches or not size else size * self.plan.groups

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]


def _nothing() -> None:
    """What is noted before a round is read ahead, where no position is kept."""
