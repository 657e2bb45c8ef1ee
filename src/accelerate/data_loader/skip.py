"""Loaders that skip their first batches, as `skip_first_batches` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from accelerate import torch_private
from accelerate.base import wrong_value
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin, kept_settings
from accelerate.data_loader.late_start import reorder, skip_prepared
from accelerate.data_loader.position import is_tracked
from accelerate.data_loader.reading import OpenPass, open_pass, read_pass, read_past
from accelerate.data_loader.samplers import SkipBatchSampler
from accelerate.state import GradientState

Loader = TypeVar("Loader", bound=DataLoader[Any])


def skip_first_batches(dataloader: Loader, num_batches: int = 0) -> Loader:
    """Returns a loader that skips its first batches in each pass.

    Map-style data is skipped by its indices, without reading a sample; iterable data has to be read. The
    loader that is passed does not change. Both count epochs together, so that it continues with the next
    epoch.

    Args:
        dataloader: A prepared loader, or a torch loader.
        num_batches: Number of batches of this process to skip.

    Returns:
        A loader of the same kind; a `SkipDataLoader` for a torch loader over iterable data.

    Raises:
        ConfigurationError: If the number of batches is negative, or no whole number.
    """
    number: object = num_batches
    if not isinstance(number, Real) or number % 1:
        raise wrong_value("num_batches", number, "it is not a whole number", "Use 0 or more", TypeError)
    if num_batches < 0:
        raise wrong_value(
            "num_batches", num_batches, "batches that were never read cannot be put back", "use 0 or more"
        )
    num_batches = int(num_batches)
    loader: Any = dataloader
    inner = getattr(loader, "dataloader", None)
    if is_tracked(inner):  # a loader around a prepared one, as on XLA devices
        late: Any = type(loader)(skip_prepared(inner, num_batches), loader.target)
    elif is_tracked(loader):
        late = skip_prepared(loader, num_batches)
    elif isinstance(loader.dataset, IterableDataset):
        late = SkipDataLoader.from_plain(loader, num_batches)
    else:
        late = reorder(loader, partial(SkipBatchSampler, skip_batches=num_batches))
    return late  # type: ignore[no-any-return]


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Loader that reads its first batches and drops them, for data that can only be read in order.

    Args:
        dataset: The dataset.
        skip_batches: Number of batches to skip at the start of each pass.
        use_stateful_dataloader: Whether torchdata's `StatefulDataLoader` reads. A restored position counts
            the skipped batches, so that a pass that resumes skips none twice.
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
        """Builds a loader that reads the same data as a torch loader over iterable data."""
        sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return cls(loader.dataset, skip_batches, **sizes, **kept_settings(loader))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return read_pass(self)

    def open_pass(self, wrap: None) -> OpenPass:
        """Opens torch's iterator, and reads past the first batches."""
        opened = open_pass(self, 0, self.skip_batches)
        restored = torch_private.count_yielded(self.base_dataloader) if self.torchdata_resumes else 0
        opened.batches = read_past(opened.batches, max(self.skip_batches - restored, 0))
        return opened

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in a batch, or None if batches have no fixed size."""
        return self.batch_size
