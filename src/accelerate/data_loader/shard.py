"""Each process reads its own share of the batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from accelerate.base import RNGType
from accelerate.data_loader.base import Carrier, DataLoaderAdapter, DataLoaderStateMixin, find_shard
from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.join import InStep
from accelerate.data_loader.late import start_where_saved
from accelerate.data_loader.reading import choose_placement, give
from accelerate.data_loader.samplers import BatchSamplerShard, SamplerShard
from accelerate.data_loader.validity import Fillers
from accelerate.devices import upload_options
from accelerate.ops import current_transport
from accelerate.rng import synchronize_rng_states
from accelerate.state import GradientState


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader whose samplers, or dataset, already give this process its share only.

    At each new pass it brings the random generators of all processes together, so that shuffles agree; it
    moves batches to the device and knows which batch is the last.

    Args:
        dataset: The dataset, sharded where it is iterable.
        device: Where batches go; None leaves them.
        rng_types: Generators to bring together at each pass: "torch", "cuda", "xla", "generator", ...
        synchronized_generator: The one meant by "generator".
        skip_batches: How many batches to pass over at the start of each pass.
        use_stateful_dataloader: See `DataLoaderAdapter`.
        torch_device_mesh: The mesh of the run.
        iteration: Number of the first epoch.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    _step: InStep | None = None
    _goes_on_with: Any = None

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
        self.deals_ready_batches = self._counts_batches and isinstance(self.sampler, SamplerShard)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.read_through(None)

    def read_through(self, carrier: Carrier | None) -> Iterator[Any]:
        """Make one pass over the batches.

        Args:
            carrier: Takes torch's iterator and gives the batches on, such as a loader that moves them in the
                background; None: nobody in between.
        """
        if (rest := start_where_saved(self)) is not None:
            yield from rest.read_through(carrier)  # type: ignore[attr-defined]  # of the same kind
            return
        self._synchronize_generators()
        epoch = self._agree_on_epoch()
        self.begin()
        try:
            batches, fillers = self._open_source(self.skip_batches, carrier)
            place = choose_placement(self.device, self._non_blocking)
            yield from give(self, batches, fillers, self._first_number() + self.skip_batches, place)
        finally:
            self.end()
            self._advance(epoch)

    def _open_source(
        self, skip: int, carrier: Carrier | None = None
    ) -> tuple[Iterator[tuple[Any, bool]], Fillers]:
        if not self._goes_in_step:
            return super()._open_source(skip, carrier)
        step = self._step = InStep(
            current_transport(),
            self.groups_of_ranks(),
            fills_short=self._auto_collation,
            drop_last=self._drop_last,
        )
        kept = self.batches_kept if self.keeps_first_round else 0
        source, _, fillers = self._open_batches(skip, kept)
        step.first, self._goes_on_with = self._goes_on_with, None
        if kept:
            step.first = next(source, None)
        number = self._first_number() + skip
        return step.take(source, self.choose_note(), self.keep_note, number, fillers), fillers

    @property
    def _goes_in_step(self) -> bool:
        return self.plan.own_shares

    @property
    def batches_kept(self) -> int:
        """How many batches at the beginning of an epoch a late start reads, to fill the end of the epoch."""
        return int(self._goes_in_step)

    @property
    def batches_in_round(self) -> int:
        """How many batches of the dataset, or of this group's share, one batch of this loader takes."""
        return 1 if self.plan.own_shares else super().batches_in_round

    def _first_round(self) -> list[Any]:
        return [self._step.first] if self._step is not None else super()._first_round()

    def _fill_with(self, first: list[Any]) -> None:
        if self._goes_in_step:
            (self._goes_on_with,) = first
        else:
            super()._fill_with(first)

    def _synchronize_generators(self) -> None:
        if self.position.resume is not None:  # its own states are about to be set
            return
        types = self.rng_types
        if types is not None and self.synchronized_generator is None:
            types = [kind for kind in types if RNGType(kind) != RNGType.GENERATOR]
        if types:
            synchronize_rng_states(types, self.synchronized_generator)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch over all processes; None where batches have no fixed size."""
        shard = find_shard(self._index_sampler)
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
            if name == "dataloader":  # not there yet while it is being unpickled
                raise AttributeError(name)
            return getattr(self.dataloader, name)

    return MpDeviceLoaderWrapper
