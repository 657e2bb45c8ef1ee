"""Shards of iterable datasets that every process iterates completely, each keeping its part of the samples.

`prepare_data_loader` wraps the dataset of a loader in an `IterableDatasetShard` where neither rank 0 reads
for all processes nor the dataset shards itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelerate.base import CheckpointError
from accelerate.data_loader.last_batch import PaddingSource, SampleWithCounts, pad, samples_per_part
from accelerate.data_loader.samplers import check_split
from accelerate.data_loader.stream_check import StreamCheck

_DATASET_KEY, _PADDING_KEY = "accelerate_dataset", "accelerate_first"


class ReadSegment(NamedTuple):
    """Part of an epoch that was read by one number of data-parallel groups."""

    steps: int  # in each of which every group read one batch
    samples: int  # of the dataset, in all these steps
    parts: int | None = None  # that the workers yielded in turn; None if each step was one of them


@dataclass(eq=False, repr=False)
class IterableDatasetShard(IterableDataset[Any]):
    """Shard of one process of the samples of an iterable dataset.

    Every process iterates the whole dataset and keeps its part of each global batch: process `i` keeps the
    `i`-th part. The dataset must therefore yield the same samples in the same order on all processes. A
    dataset that shuffles does so by its `set_epoch`, or with a `torch.Generator` in its attribute
    `generator`, which is seeded again for each epoch. A short global batch at the end is dropped with
    `drop_last`, and otherwise padded with samples from the beginning of the pass.

    Args:
        dataset: The dataset to shard.
        batch_size: Size of the batch of one process, or of the global batch with `split_batches`.
        drop_last: Whether to drop the short global batch at the end.
        num_processes: Number of processes that shard the samples.
        process_index: Index of this process, from 0.
        split_batches: Whether `batch_size` is the size of the global batch.
        even_batches: Whether to pad the short global batch; otherwise it is split as it is, and processes may
            get fewer samples.

    Raises:
        ConfigurationError: If `num_processes` does not divide the batch size that `split_batches` splits.
    """

    dataset: Any
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        if self.split_batches:
            check_split(self.batch_size, self.num_processes)
        self.epoch = 0
        generator = getattr(self.dataset, "generator", None)
        self._seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None
        self.used: tuple[ReadSegment, ...] = ()  # read by earlier runs in each pass
        self.padding_source = PaddingSource()
        self.stream_check: StreamCheck | None = None  # set if the dataset may read its rank
        self.attaches_counts = False
        """Whether a padded batch carries its counts; set if the reader removes them."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, here and on the dataset if it has one."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def part_size(self) -> int:
        """Number of samples of each global batch that this process keeps."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __len__(self) -> int:
        global_size = self.part_size * self.num_processes
        remaining = len(self.dataset) - sum(segment.samples for segment in self.used)
        steps, rest = divmod(max(remaining, 0), global_size)
        if self.drop_last:
            return steps * self.part_size
        if self.even_batches:
            return (steps + (rest > 0)) * self.part_size
        last = samples_per_part(rest, self.part_size, self.num_processes)[self.process_index]
        return steps * self.part_size + last

    def __iter__(self) -> Iterator[Any]:
        part, processes = self.part_size, self.num_processes
        start, stop = self.process_index * part, (self.process_index + 1) * part
        global_size = part * processes
        if self._seed is not None and not hasattr(self.dataset, "set_epoch"):
            self.dataset.generator.manual_seed((self._seed + self.epoch) % 2**64)
        source: Iterator[Any] = iter(self.dataset)
        if self.used:
            skip_used(source, self.used)
        if self.stream_check is not None:
            source = chain(self.stream_check.read(self.dataset, source, global_size), source)
        current = list(islice(source, global_size))
        self.padding_source.items = self.padding_source.take_restored() or current
        while len(current) == global_size:
            yield from current[start:stop]
            current = list(islice(source, global_size))
        if not current or self.drop_last:
            return
        last = pad(current, self.padding_source.items, global_size) if self.even_batches else current
        shard = last[start:stop]
        if self.attaches_counts and shard:
            shard[0] = SampleWithCounts(shard[0], tuple(samples_per_part(len(current), part, processes)))
        yield from shard


def skip_used(source: Iterator[Any], used: tuple[ReadSegment, ...]) -> None:
    """Reads the samples of a stream that earlier runs have read, in this worker of the loader.

    Workers yield batches in turn, so each worker has read its part of the steps.

    Raises:
        CheckpointError: If the stream of this worker had ended, and the other workers have read more than
            their part.
    """
    info = get_worker_info()
    workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
    counts = [(segment.parts or segment.steps, segment.samples) for segment in used]
    parts = [(-((worker - count) // workers), samples // count) for count, samples in counts]
    expected = sum(steps * size for steps, size in parts)
    missing = expected - sum(1 for _ in islice(source, expected))
    last_size = next((size for steps, size in reversed(parts) if steps), 0)
    if workers > 1 and missing and missing >= last_size:
        raise CheckpointError(
            f"A loader cannot continue in the middle of this epoch: the samples of worker {worker} of "
            f"{workers} had ended, and how many samples the other workers have read is not known. Continue "
            "with the same number of processes until the end of the epoch, or from a checkpoint between two "
            "epochs."
        )


# Datasets with a state


class StatefulDatasetShard(IterableDatasetShard):
    """Iterable shard whose state is that of the whole dataset between two global batches.

    It is a class of its own because torchdata recognizes a dataset with a state by the methods of its class.
    Of datasets without these methods, torchdata reads and drops the first batches.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the dataset, and the first global batch, which pads the end of the epoch."""
        pads = self.even_batches and not self.drop_last
        first = self.padding_source.items if pads else []
        return {_DATASET_KEY: self.dataset.state_dict(), _PADDING_KEY: first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the state of the dataset with which the next pass begins."""
        self.dataset.load_state_dict(state[_DATASET_KEY])
        self.padding_source.restored = state[_PADDING_KEY]


def has_state(dataset: object) -> bool:
    """Returns whether a dataset can save and restore its position without a loss of samples."""
    has_methods = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_methods and not _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))


def _has_shuffle_buffer(stage: object) -> bool:
    """Returns whether a stream of `datasets` has a shuffle buffer, whose samples are not in its state."""
    if stage is None:
        return False
    inner = [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return type(stage).__name__ == "BufferShuffledExamplesIterable" or any(map(_has_shuffle_buffer, inner))


def with_state(shard: IterableDatasetShard) -> IterableDatasetShard:
    """Returns a shard with the state of its dataset, if that has one and is read in whole global batches."""
    if type(shard) is not IterableDatasetShard or not shard.attaches_counts or not has_state(shard.dataset):
        return shard
    stateful = copy(shard)
    stateful.__class__ = StatefulDatasetShard
    return stateful


def state_of_dataset(state: object) -> Any:
    """Returns the state of a dataset from its own state or from that of a shard of it."""
    return state[_DATASET_KEY] if isinstance(state, dict) and _DATASET_KEY in state else state


def stream_with_state(dataset: Any) -> Any:
    """Returns the iterable dataset that has a state, that of a shard first, or None."""
    if not isinstance(dataset, IterableDataset):
        return None
    inner = getattr(dataset, "dataset", None)
    return next((stream for stream in (inner, dataset) if has_state(stream)), None)
