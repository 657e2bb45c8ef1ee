"""Private attributes of data loaders, their iterators and samplers.

Prefetching, resuming and hang reports use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

WAIT_FOR_BATCH, WORKER_LOOP = "_get_data", "_worker_loop"
"""Names in stacks of the function of a DataLoader that waits for a batch, and the loop of a worker."""

requested_samples: Callable[[Any], int | None] = attrgetter("_num_samples")
"""Argument num_samples of a RandomSampler, whose public attribute is never None."""


def wrap_indices(iterator: Any, wrap: Callable[[Any], Any]) -> Any:
    """Replaces the sampler iterator of a `SingleProcessIterator` by `wrap` of it, and returns the new one.

    There is no other way to get the indices before the samples are read.
    """
    iterator._sampler_iter = wrap(iterator._sampler_iter)
    return iterator._sampler_iter


def watch_indices(note: Callable[[Any, Any], None]) -> None:
    """Calls `note` with an iterator of a DataLoader and the indices of each batch that it requests."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter  # the launcher imports this file without it

    original: Callable[[Any], Any] = _BaseDataLoaderIter._next_index

    def next_index(self: object) -> Any:
        indices = original(self)
        note(self, indices)
        return indices

    _BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign]


def replace_fetch(fetch: Callable[[Any, Any, int], Any]) -> None:
    """Replaces how a DataLoader reads the samples of a batch from a dataset with indices.

    Args:
        fetch: Function of the fetcher, the indices and the number of the batch in the pass, which is called
            in the process that reads.
    """
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    original: Callable[[Any, Any], Any] = _MapDatasetFetcher.fetch

    def fetch_batch(self: Any, indices: Sequence[int]) -> Any:
        if not self.auto_collation:
            return original(self, indices)
        worker, count = get_worker_info(), getattr(self, "num_fetched", 0)
        self.num_fetched = count + 1
        return fetch(self, indices, count if worker is None else count * worker.num_workers + worker.id)

    _MapDatasetFetcher.fetch = fetch_batch  # type: ignore[method-assign]


def read_sample(fetcher: Any, index: Any) -> Any:
    """Returns one sample of the dataset of a fetcher."""
    read_several = getattr(fetcher.dataset, "__getitems__", None)
    return read_several([index])[0] if read_several else fetcher.dataset[index]


def sources_of(loader: Iterable[Any]) -> tuple[Any, Any]:
    """Returns the index sampler and the dataset of a DataLoader or of an iterator of one."""
    dataset = getattr(loader, "dataset", None)
    return getattr(loader, "_index_sampler", None), getattr(loader, "_dataset", dataset)


def loader_workers(iterator: object) -> Any:
    """Returns the worker processes of an iterator of a DataLoader, for hang reports."""
    return getattr(iterator, "_workers", ())


def loader_progress(iterator: object) -> tuple[int, int]:
    """Returns values that change with each batch and each epoch of an iterator with workers."""
    # torchdata requests the states of its workers before these attributes exist
    return getattr(iterator, "_rcvd_idx", 0), id(getattr(iterator, "_sampler_iter", None))


def count_yielded(loader: Iterable[Any]) -> int:
    """Returns the number of batches that the current iterator of a loader has yielded.

    Batches before a restored state are included.
    """
    return getattr(getattr(loader, "_iterator", None), "_num_yielded", 0)


def dataset_state(state: Mapping[str, Any]) -> Any:
    """Returns the state of an iterable dataset in the state of an iterator of torchdata without workers.

    A dataset that is its own iterator has its state as the one of the iterator. The result is None for a
    dataset without a state.
    """
    found = state.get("dataset_state")
    return (state.get("fetcher_state") or {}).get("dataset_iter_state") if found is None else found


def has_dataset_state(state: Mapping[str, Any]) -> bool:
    """Returns whether the state of torchdata's iterator includes that of an iterable dataset, in each worker.

    Without it torchdata reads and drops what was read before, and counts twice what it drops: a second resume
    within an epoch would skip samples.
    """
    snapshots = state.get("_snapshot", {}).get("_worker_snapshots", {"": state})
    return all(dataset_state(each) is not None for each in snapshots.values())


def loader_tasks(iterator: Iterator[Any]) -> list[Any]:
    """Returns the requested batches in order, as tuples of the worker ID and the data if it has arrived."""
    return [task for _, task in sorted(getattr(iterator, "_task_info", {}).copy().items())]
