"""Start in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from accelerate.base import wrong_value
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin, kept_settings
from accelerate.data_loader.late import skipping, start_late, variant_of
from accelerate.data_loader.reading import give
from accelerate.data_loader.shard import DataLoaderShard
from accelerate.state import GradientState

Loader = TypeVar("Loader", bound=DataLoader[Any])


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
            batches, fillers = self._open_source(self.skip_batches)
            yield from give(self, batches, fillers, self.skip_batches, None)
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


def skip_first_batches(dataloader: Loader, num_batches: int = 0) -> Loader:
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
    rest: Any = _late_start(dataloader, num_batches)
    return rest  # type: ignore[no-any-return]


def _late_start(loader: Any, skipped: int) -> Any:
    inner = getattr(loader, "dataloader", None)
    if isinstance(inner, DataLoaderShard):  # a loader around a prepared one, as on XLA devices
        return type(loader)(_late_start(inner, skipped), loader.target)
    if not isinstance(loader, DataLoaderAdapter):
        return _late_start_of_plain(loader, skipped)
    return start_late(loader, skipped)


def _late_start_of_plain(loader: DataLoader[Any], skipped: int) -> DataLoader[Any]:
    if isinstance(loader.dataset, IterableDataset):
        sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return SkipDataLoader(loader.dataset, skip_batches=skipped, **sizes, **kept_settings(loader))
    return variant_of(loader, **skipping(loader, skipped))
