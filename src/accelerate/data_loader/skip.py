"""Start in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate.base.errors import wrong_value
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin, kept_settings
from accelerate.data_loader.reading import look_ahead
from accelerate.data_loader.samplers import SkipBatchSampler
from accelerate.data_loader.shard import DataLoaderShard
from accelerate.state import GradientState


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that reads its first batches and throws them away: for data that can only be read in order.

    Args:
        dataset: The dataset.
        skip_batches: How many batches to pass over at the start of each pass.
        use_stateful_dataloader: See `DataLoaderAdapter`.
        **kwargs: As for `torch.utils.data.DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch = self._agree_on_epoch()
        self.begin()
        try:
            source, fillers = self._open_source()
            skipped = self.skip_batches
            yield from look_ahead(self, islice(source, skipped, None), fillers, skipped, None)
        finally:
            self.end()
            self._advance(epoch)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch; None where batches have no fixed size."""
        return self.batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader like this one that starts `num_batches` batches late, at each of its passes.

    Map-style data is passed over by its indices, without reading a sample; iterable data has to be read. The
    loader that was given stays as it is; both count epochs together, so that it goes on with the next epoch.

    Args:
        dataloader: A prepared loader, or a plain one.
        num_batches: How many batches of this process to pass over.

    Returns:
        A loader of the same kind; a plain one over iterable data becomes a `SkipDataLoader`.

    Raises:
        ConfigurationError: A negative number of batches.
    """
    if num_batches < 0:
        raise wrong_value(
            "num_batches", num_batches, "batches that were never read cannot be put back", "use 0 or more"
        )
    inner = getattr(dataloader, "dataloader", None)
    if isinstance(inner, DataLoaderShard):  # a loader around a prepared one, as on XLA devices
        return type(dataloader)(skip_first_batches(inner, num_batches), dataloader.target)
    prepared = isinstance(dataloader, DataLoaderAdapter)
    if isinstance(dataloader.dataset, IterableDataset):
        if not prepared:
            settings = kept_settings(dataloader)
            sizes = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
            return SkipDataLoader(dataloader.dataset, skip_batches=num_batches, **sizes, **settings)
        return _variant(dataloader, skip_batches=dataloader.skip_batches + num_batches, origin=dataloader)
    name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    skipped = num_batches * dataloader.batches_per_step if prepared else num_batches
    changed: dict[str, Any] = {name: SkipBatchSampler(getattr(dataloader, name), skipped)}
    return _variant(dataloader, **changed, **({"origin": dataloader} if prepared else {}))


def _variant(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A loader that is the same but for some attributes, also those that torch forbids to assign later."""
    kind = type(loader)
    variant = kind.__new__(kind)
    variant.__dict__.update(loader.__dict__, _iterator=None, **changed)
    return variant
