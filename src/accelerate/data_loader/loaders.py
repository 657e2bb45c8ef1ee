"""Loader whose process reads its own shard, and the loader around it on XLA devices.

`prepare_data_loader` returns one of them, or a `DataLoaderDispatcher`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from accelerate.base import RNGType
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.constant_batches import ConstantBatchShard
from accelerate.data_loader.iterable_shard import IterableDatasetShard
from accelerate.data_loader.joining import DatasetJoin
from accelerate.data_loader.late_start import make_resumed_loader
from accelerate.data_loader.rank_aware import pads_like_torch
from accelerate.data_loader.reading import (
    IteratorWrapper,
    LastMark,
    OpenPass,
    open_batches,
    open_pass,
    read_pass,
)
from accelerate.data_loader.resume import keep_source_state, source_state
from accelerate.data_loader.samplers import BatchSamplerShard, SamplerShard, first_number, shard_of
from accelerate.devices import upload_options
from accelerate.ops import current_transport
from accelerate.rng import synchronize_rng_states
from accelerate.state import GradientState


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """Loader whose samplers, or dataset, yield the shard of this process only.

    At each new pass it synchronizes the random generators of all processes, so that all shuffle in the same
    order. It moves batches to the device and recognizes the last batch.

    Args:
        dataset: The dataset, sharded if it is iterable.
        device: Device of the batches; None leaves them where they are.
        rng_types: Generators to synchronize at each pass: "torch", "cuda", "xla", "generator", ...
        synchronized_generator: The generator of the type "generator".
        skip_batches: Number of batches to skip at the start of each pass.
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

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return read_pass(self)

    def begin_pass(self) -> Any:
        """Begins a pass, and returns the loader that makes it, which is this one or a late start of it."""
        late = make_resumed_loader(self)
        loader = self if late is None else late
        loader._synchronize_generators()
        return loader

    def open_pass(self, wrap: IteratorWrapper | None) -> OpenPass:
        """Opens torch's iterator, which `wrap` may replace."""
        skipped = self.skip_batches + self.start.skip_source
        number = first_number(self._index_sampler) + skipped
        if self.plan.mode == "dataset_shards":
            return self._open_dataset_shard(number)
        return open_pass(self, skipped, number, wrap)

    def _open_dataset_shard(self, number: int) -> OpenPass:
        """Opens a pass over a shard that the dataset makes, whose length is known on this rank only."""
        kept = self.num_padding_batches if self.start.keeps_padding_source else 0
        stream = None if self.tracker.restored is None else self.start.position.stream
        ended = stream if stream is not None and stream.get("ended") else None
        source, _, padding_record = open_batches(self, self.skip_batches, kept)
        restored = self.padding_source.take_restored()
        self.padding_source.items = list(islice(source, kept)) or restored
        if ended is not None:
            next(source, None)
        join = DatasetJoin(
            current_transport(),
            self.groups_of_ranks(),
            self.padding_source,
            pads_short=self.batch_sampler is not None,
            drop_last=self._drop_last,
        )
        mark = LastMark()
        capture = source_state(self)
        batches = join.take(source, mark, capture, self._keep_shard_state, number, padding_record, ended)
        return OpenPass(batches, mark, padding_record, number)

    def _keep_shard_state(self, state: Any, ended: bool) -> None:
        if state is not None:  # may have been captured before the first batch was read
            state = {**state, "first": self.padding_source.items, "ended": ended}
        keep_source_state(self, state)

    def _synchronize_generators(self) -> None:
        if self.tracker.restored is not None:  # the states of the checkpoint are set instead
            return
        types = self.rng_types
        if types is not None and self.synchronized_generator is None:
            types = [kind for kind in types if RNGType(kind) != RNGType.GENERATOR]
        if types:
            synchronize_rng_states(types, self.synchronized_generator)

    @property
    def shards_whole_batches(self) -> bool:
        """True if whole batches of any size are sharded, and `valid_counts` is right for this rank only."""
        if self.plan.mode == "already_sharded" and not self.plan.even:
            return not pads_like_torch(getattr(shard_of(self._index_sampler), "batch_sampler", None))
        return self.counts_batches and isinstance(shard_of(self._index_sampler), SamplerShard)

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in a global batch, or None if batches have no fixed size."""
        shard = shard_of(self._index_sampler)
        size: int | None = getattr(self._index_sampler, "batch_size", None)
        if isinstance(shard, ConstantBatchShard):
            return shard.total_batch_size
        if isinstance(shard, BatchSamplerShard):
            return size if shard.split_batches or not size else size * shard.num_processes
        if self.plan.has_own_shards:
            return size and size * self.plan.groups
        if isinstance(self.dataset, IterableDatasetShard) and size:
            return size * self.dataset.num_processes
        return None if isinstance(shard, SamplerShard) else size


@cache
def wrapper_for_xla() -> type:
    """Builds the class `MpDeviceLoaderWrapper` on the loader of torch_xla."""
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    class MpDeviceLoaderWrapper(MpDeviceLoader):  # type: ignore[misc]
        """Prepared loader whose batches torch_xla moves to the device in the background.

        Args:
            dataloader: A prepared loader that leaves batches on the CPU.
        """

        def __init__(self, dataloader: DataLoaderShard, device: Any) -> None:
            super().__init__(dataloader, device)
            self.dataloader = dataloader
            self.target = device

        def __iter__(self) -> Iterator[Any]:
            options = upload_options()
            return read_pass(
                self.dataloader, lambda source: iter(MpDeviceLoader(source, self.target, **options))
            )

        def __len__(self) -> int:
            return len(self.dataloader)

        def __getattr__(self, name: str) -> Any:
            if name == "dataloader":  # missing while it is unpickled
                raise AttributeError(name)
            return getattr(self.dataloader, name)

    return MpDeviceLoaderWrapper
