"""Which samples of an iterable dataset each process takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate.base import wrong_value
from accelerate.data_loader.last_batch import FirstRound, Tagged, fill, real_per_part


class IterableDatasetShard(IterableDataset[Any]):
    """The shard of one process of the samples of an iterable dataset.

    Every process iterates the whole dataset and keeps its part of each global batch: process `i` takes the
    `i`-th part. The dataset must therefore give the same samples in the same order everywhere: one that
    shuffles does so by its `set_epoch`, or with a `torch.Generator` in its attribute `generator`, which is
    seeded anew for each epoch. A short global batch at the end is dropped with `drop_last`, else filled with
    samples from the beginning of the pass.

    Args:
        dataset: The dataset to share.
        batch_size: Size of the batch of one process, or of the global batch with `split_batches`.
        drop_last: Leave the short global batch at the end out.
        num_processes: How many processes share the samples.
        process_index: Which of them this is, from 0.
        split_batches: Whether `batch_size` is that of the global batch.
        even_batches: Fill the short global batch; otherwise it is shared as it is, and ranks may get fewer
            samples.

    Raises:
        ConfigurationError: `split_batches` with a batch size that `num_processes` does not divide.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        if split_batches and batch_size % num_processes:
            raise wrong_value(
                "batch_size",
                batch_size,
                f"with split_batches each batch is cut into {num_processes} equal parts",
                f"Take a multiple of {num_processes}, or leave split_batches off",
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epoch = 0
        generator = getattr(dataset, "generator", None)
        self._seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None
        self.skip_samples = 0
        """Samples at the beginning of each pass that an earlier run has used."""
        self.first_round = FirstRound()
        self.tagged = False
        """Whether a batch with filler is tagged with its counts; set where the reader removes the tags."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, here and in the dataset where it has one."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def part_size(self) -> int:
        """How many samples of each global batch this process takes."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __len__(self) -> int:
        whole = self.part_size * self.num_processes
        rounds, rest = divmod(max(len(self.dataset) - self.skip_samples, 0), whole)
        if self.drop_last:
            return rounds * self.part_size
        if self.even_batches:
            return (rounds + (rest > 0)) * self.part_size
        last = real_per_part(rest, self.part_size, self.num_processes)[self.process_index]
        return rounds * self.part_size + last

    def __iter__(self) -> Iterator[Any]:
        part, processes = self.part_size, self.num_processes
        start, stop, whole = self.process_index * part, (self.process_index + 1) * part, part * processes
        self._reseed()
        source = islice(self.dataset, self.skip_samples, None)
        current = list(islice(source, whole))
        self.first_round.items = self.first_round.take_restored() or current
        while len(current) == whole:
            yield from current[start:stop]
            current = list(islice(source, whole))
        if not current or self.drop_last:
            return
        last = fill(current, self.first_round.items, whole) if self.even_batches else current
        mine = last[start:stop]
        if self.tagged and mine:
            mine[0] = Tagged(mine[0], tuple(real_per_part(len(current), part, processes)))
        yield from mine

    def _reseed(self) -> None:
        """Seed the dataset's own generator for the epoch, unless its `set_epoch` does."""
        if self._seed is not None and not hasattr(self.dataset, "set_epoch"):
            self.dataset.generator.manual_seed((self._seed + self.epoch) % 2**64)
