"""Each process reads its own shard of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.base import PreparationError, RNGType
from accelerate.data_loader.base import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    kept_settings,
    one_pass,
)
from accelerate.data_loader.last_batch import Counts, Fillers, FirstRound, count_samples, first_samples, join
from accelerate.data_loader.reading import (
    IteratorWrapper,
    choose_move,
    open_batches,
    open_pass,
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
from accelerate.devices import upload_options
from accelerate.ops import Transport, current_transport
from accelerate.rng import synchronize_rng_states
from accelerate.state import GradientState

_END = object()


class Join:
    """Joins ranks with uneven shares: each takes a batch in every round, as long as any rank has one.

    The batch of a rank that has fewer samples than the others in a round, or none, is filled from the first
    batch of its share. One small collective in each round exchanges how many samples each rank has; it runs
    for the next round before a batch is yielded, so every rank knows which batch is the last.

    Args:
        first_round: Its item is the first batch of this rank's share; empty where that is not read yet.
        fills_short: Whether a short batch is filled; otherwise only a missing one is replaced.
        drop_last: End when the first rank does, instead of filling.
    """

    def __init__(
        self,
        transport: Transport,
        group_of: Sequence[int],
        first_round: FirstRound,
        *,
        fills_short: bool,
        drop_last: bool,
    ) -> None:
        self._transport = transport
        self._first_ranks = [group_of.index(group) for group in sorted(set(group_of))]
        self._fills_short = fills_short
        self._goes_on: Callable[[Counts], bool] = all if drop_last else any
        self._first_round = first_round

    def take(
        self,
        batches: Iterator[Any],
        capture: Callable[[], Any] | None,
        keep: Callable[[Any], None],
        number: int,
        fillers: Fillers,
    ) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of this rank, each with whether it is the last one; `fillers` gets the real
        samples of each rank, for batches where they differ and the last."""
        current = next(batches, _END)
        if begins := not self._first_round.items:
            self._first_round.items = [current]
        state = capture() if capture else None
        counts = self._exchange(current)
        empty = [group for group, count in enumerate(counts) if not count]
        if begins and self._goes_on is any and empty and any(counts):
            raise PreparationError(
                f"The dataset shards itself, and the shares {empty} of {len(counts)} are empty, so that "
                "there is nothing to fill their batches with. Give the dataset at least as many shards as "
                "there are processes, or prepare its loader with dispatch_batches=True."
            )
        while self._goes_on(counts):
            upcoming = next(batches, _END)
            # Behind its end a share would begin anew: a rank without batches keeps the state before its end.
            upcoming_state = capture() if capture and upcoming is not _END else state
            upcoming_counts = self._exchange(upcoming)
            is_last = not self._goes_on(upcoming_counts)
            if capture:
                keep(capture() if is_last else state)
            if is_last or len(set(counts)) > 1:
                fillers[number] = counts
            yield self._filled(current, counts), is_last
            current, state, counts = upcoming, upcoming_state, upcoming_counts
            number += 1

    def _exchange(self, batch: Any) -> Counts:
        """The samples of this round's batch on each group; a batch that cannot be counted is one."""
        samples = 0 if batch is _END else count_samples(batch)
        gathered = self._transport.gather(torch.tensor([1 if samples is None else samples])).tolist()
        return tuple(gathered[rank] for rank in self._first_ranks)

    def _filled(self, batch: Any, counts: Counts) -> Any:
        first = self._first_round.items
        if not self._fills_short:
            return first[0] if batch is _END else batch
        real = [] if batch is _END else [batch]
        missing = max(counts) - sum(count_samples(batch) or 1 for batch in real)
        return join([*real, *first_samples(first, missing)])


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

    def read_through(self, wrap: IteratorWrapper | None) -> Iterator[Any]:
        """Make one pass over the batches.

        Args:
            wrap: Takes torch's iterator and yields its batches, such as a loader that moves them in the
                background; None: they come from torch's iterator.
        """
        if (late := start_where_saved(self)) is not None:
            yield from late.read_through(wrap)
            return
        self._synchronize_generators()
        with one_pass(self):
            number = first_number(self._index_sampler) + self.skip_batches
            if self.plan.own_shares:
                batches, fillers = self._open_own_share(number)
            else:
                batches, fillers = open_pass(self, self.skip_batches, wrap)
            move = choose_move(self.device, self._non_blocking)
            yield from yield_batches(self, batches, fillers, number, move)

    def _open_own_share(self, number: int) -> tuple[Iterator[tuple[Any, bool]], Fillers]:
        """Start a pass over a shard that the dataset makes, and whose length other ranks do not know."""
        kept = self.batches_kept if self.start.keeps_first_round else 0
        source, _, fillers = open_batches(self, self.skip_batches, kept)
        restored = self.first_round.take_restored()
        self.first_round.items = list(islice(source, kept)) or restored
        join = Join(
            current_transport(),
            self.groups_of_ranks(),
            self.first_round,
            fills_short=self.batch_sampler is not None,
            drop_last=self._drop_last,
        )
        keep = partial(keep_source_state, self)
        return join.take(source, source_state(self), keep, number, fillers), fillers

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

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole dataset."""
        dataset: Any = self.dataset
        if hasattr(dataset, "total_length"):
            length: int = dataset.total_length
            return length
        return len(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that reads its first batches and drops them: for data that can only be read in order.

    Args:
        dataset: The dataset.
        skip_batches: How many batches to skip at the start of each pass.
        use_stateful_dataloader: See `DataLoaderAdapter`.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

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
        return cls(loader.dataset, skip_batches=skip_batches, **sizes, **kept_settings(loader))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with one_pass(self):
            batches, fillers = open_pass(self, self.skip_batches)
            yield from yield_batches(self, batches, fillers, self.skip_batches, None)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch; None where batches have no fixed size."""
        return self.batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]


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
