"""Shards of samplers and batch samplers, and batch samplers that skip their first batches.

`prepare_data_loader` gives a map-style loader one of these shards; a loader that starts in the middle of an
epoch reads through a `SkipBatchSampler`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import chain, count, dropwhile, islice, takewhile
from operator import length_hint
from types import GeneratorType
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from accelerate.base import wrong_value
from accelerate.data_loader.last_batch import PaddingRecord, pad, samples_per_part
from accelerate.data_loader.permutation import BLOCK, ConstantMemorySampler, SeedableRandomSampler
from accelerate.data_loader.rank_aware import OrderCheck, SamplerJoin, count_padding, pads_like_torch

Batch = list[Any]

_END = object()
_SEEKABLE: tuple[type, ...] = (type(iter([])), type(iter(range(0))))
"""Iterators that can be moved to any index."""
_ORDER_KNOWN_AT_ONCE = frozenset({SequentialSampler, RandomSampler, SeedableRandomSampler})
_SKIPS_AT_ONCE = _ORDER_KNOWN_AT_ONCE | {ConstantMemorySampler}


def check_split(batch_size: int | None, parts: int, fix: str = "Take") -> None:
    """Raises an error if a batch cannot be split into equal parts."""
    if not batch_size or batch_size % parts:
        raise wrong_value(
            "batch_size",
            batch_size,
            f"with split_batches each batch is split into {parts} equal parts",
            f"{fix} a multiple of {parts}, or leave split_batches off",
        )


@dataclass(eq=False, repr=False)
class BatchSamplerShard(BatchSampler):
    """Shard of one process of the batches of a batch sampler, of any kind and any batch sizes.

    Without `split_batches`, process `i` takes the `i`-th batch of every `num_processes` batches, which
    together are a global batch. With `split_batches`, each batch is split into `num_processes` parts and
    process `i` takes the `i`-th part.

    The end of the epoch rarely fills a global batch. A sampler with a true `drop_last` drops the incomplete
    global batch. Otherwise, with `even_batches`, it is padded with indices from the beginning of the epoch,
    so that all processes get the same number of batches of one size; without `even_batches` it is sharded as
    it is and processes may get fewer or smaller batches. If batch sizes vary by design, global batches are
    padded with whole batches instead.

    `padding_record` has, for each batch of the latest pass that is padded or differs in size between
    processes, the number of its real indices on each process. `num_processes` and `process_index` may be
    assigned; with one process every batch is yielded unchanged.

    Args:
        batch_sampler: Iterable of lists of indices; all processes must have the same lists in the same order.
        num_processes: Number of processes that shard the batches.
        process_index: Index of this process, from 0.
        split_batches: Whether to split each batch, instead of sharding whole batches.
        even_batches: Whether to pad the last global batch.

    Raises:
        ConfigurationError: If `split_batches` is set without a batch size, or with one that `num_processes`
            does not divide.
    """

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        self.batch_size = cast(int, getattr(self.batch_sampler, "batch_size", None))
        self.drop_last = bool(getattr(self.batch_sampler, "drop_last", False))
        self.padding_record: PaddingRecord = {}
        self.already_sharded = False  # whether the batches are those of this rank, and are yielded unchanged
        self.extra_batches = 0  # batches that this rank repeats until the other ranks end
        self.join: SamplerJoin | None = None  # None if ranks cannot be reached
        self.order_check: OrderCheck | None = None  # set if the sampler may be rank-aware
        if self.split_batches:
            check_split(self.batch_size, self.num_processes, "Give a batch sampler whose batch_size is")

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the batch sampler, or None if it has none."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """The number of batches of all processes together, before they are sharded."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self.iter_from(0)

    def iter_from(self, number: int) -> Iterator[Batch]:
        """Begins a pass, and skips the first `number` batches of this process."""
        # Each pass has its own record, made before its first batch: two passes may run at the same time.
        self.padding_record = {}
        if self.num_processes == 1:
            return start_at(self.batch_sampler, number)
        if self.already_sharded:
            return self._batches_of_rank(number)
        if type(self.batch_sampler) is BatchSampler and type(self.sampler) is ConstantMemorySampler:
            return self._computed_batches(self.sampler, self.padding_record, number)
        if type(self.batch_sampler) is BatchSampler and type(self.sampler) in _ORDER_KNOWN_AT_ONCE:
            return self._slices(self.sampler, self.padding_record, number)
        source = iter(self.batch_sampler)
        if self.order_check is not None:
            source = self.order_check.watch(source)
        if self.split_batches:
            batches = self._parts(source, self.padding_record)
        elif self.drop_last or not self.even_batches:
            batches = self._unpadded_batches(source, self.padding_record)
        else:
            batches = self._padded_batches(source, self.padding_record)
        return islice(batches, number, None)

    def _batches_of_rank(self, number: int) -> Iterator[Batch]:
        """Returns the batches of a rank-aware batch sampler, with which all ranks may end together."""
        if pads_like_torch(self.batch_sampler):
            source = start_at(self.batch_sampler, number)
            return count_padding(source, number, self.sampler, self.batch_size, self.padding_record)
        if self.join is None or not self.even_batches:
            return start_at(self.batch_sampler, number)
        return self.join.take(iter(self.batch_sampler), number, self.padding_record)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.num_processes == 1:
            return batches
        if self.already_sharded:
            return batches + self.extra_batches * self.even_batches
        if self.split_batches:
            return batches - self._last_part_is_empty(batches)
        steps, rest = divmod(batches, self.num_processes)
        if self.drop_last:
            return steps
        return steps + int(rest > 0 if self.even_batches else rest > self.process_index)

    def _last_part_is_empty(self, batches: int) -> bool:
        """Returns whether this process gets nothing of the last, short batch, which is not padded."""
        if self.even_batches or self.drop_last or not self.batch_size or not isinstance(self.sampler, Sized):
            return False
        last = len(self.sampler) - (batches - 1) * self.batch_size
        return 0 < last <= self.process_index * (self.batch_size // self.num_processes)

    # Samplers of torch and of this package: the batches of other processes are not built

    def _slices(self, sampler: Sampler[int], record: PaddingRecord, number: int) -> Iterator[Batch]:
        """Yields slices of the order of a sampler that draws it at once."""
        index, (part, global_size) = self.process_index, self._sizes()
        source = iter(sampler)
        length = len(sampler)  # type: ignore[arg-type]
        full, rest = divmod(length, global_size)
        first = list(islice(source, min(global_size, length)))
        if number:
            skipped = min(number, full) * global_size
            advance(source, skipped - len(first))
            order = list(islice(source, length - skipped))
        else:
            order = first + list(islice(source, length - len(first)))
        for start in range(index * part, len(order) - rest, global_size):
            yield order[start : start + part]
        if rest and not self.drop_last and number <= full:
            yield from self._short_end(order[-rest:], first, record, full)
        next(source, None)  # lets the sampler end its pass

    def _computed_batches(
        self, sampler: ConstantMemorySampler, record: PaddingRecord, number: int
    ) -> Iterator[Batch]:
        """Yields batches whose indices are computed for this process only, for several batches at once."""
        epoch, order, (part, global_size) = sampler.epoch, sampler.order(), self._sizes()
        full, rest = divmod(len(sampler), global_size)
        in_batch = torch.arange(self.process_index * part, (self.process_index + 1) * part, device="cpu")
        for start in range(number, full, step := -(-BLOCK // part)):
            batches = torch.arange(start, min(start + step, full), device="cpu")
            yield from order(batches[:, None] * global_size + in_batch).tolist()
        if rest and not self.drop_last and number <= full:
            last = order(torch.arange(full * global_size, len(sampler))).tolist()
            first = order(torch.arange(min(global_size, len(sampler)))).tolist()
            yield from self._short_end(last, first, record, full)
        sampler.end_pass(epoch)

    def _sizes(self) -> tuple[int, int]:
        """Returns the sizes of the batch of one process and of the global batch."""
        if self.split_batches:
            return self.batch_size // self.num_processes, self.batch_size
        return self.batch_size, self.batch_size * self.num_processes

    def _short_end(self, last: Batch, first: Batch, record: PaddingRecord, number: int) -> Iterator[Batch]:
        """Yields the part of this process of the last, short global batch, if it has one."""
        part, global_size = self._sizes()
        record[number] = tuple(samples_per_part(len(last), part, self.num_processes))
        if self.even_batches:
            last = pad(last, first, global_size)
        if own := last[self.process_index * part : (self.process_index + 1) * part]:
            yield own

    # Batch samplers of other kinds

    def _unpadded_batches(self, source: Iterator[Batch], record: PaddingRecord) -> Iterator[Batch]:
        """Yields batches without padding, where an incomplete global batch is dropped or sharded."""
        processes, index = self.num_processes, self.process_index
        full = self.batch_size
        for number in count():
            current = list(islice(source, processes))
            full = full or max(map(len, current), default=0)
            if self.drop_last and len(current) < processes:
                return
            if not self.drop_last:
                _record_sizes(record, number, current, processes, full)
            if index >= len(current):
                return
            yield current[index]

    def _padded_batches(self, source: Iterator[Batch], record: PaddingRecord) -> Iterator[Batch]:
        """Yields batches of which the last global batch is padded."""
        processes, index = self.num_processes, self.process_index
        first = current = list(islice(source, processes))
        size = len(first[0]) if len(first) > 1 else max(map(len, first), default=0)
        uniform, number, sizes = True, 0, [size] * processes
        # One global batch is read ahead, because only the last one may be padded.
        while upcoming := list(islice(source, processes)):
            if list(map(len, current)) != sizes:
                uniform = False
                _record_sizes(record, number, current, processes, size)
            yield current[index]
            current, number = upcoming, number + 1
        if not current:
            return
        if number == 0 and len(current) == 1:
            size = max(size, self.batch_size or 0)
        uniform = uniform and all(len(batch) == size for batch in current[:-1]) and len(current[-1]) <= size
        padded = pad(current, first, processes)
        if uniform:  # batches of one size: the last indices, then those at the beginning of the epoch
            indices = pad(chain(*current), chain(*first), size * processes)
            padded = [indices[start : start + size] for start in range(0, size * processes, size)]
        real = [len(batch) for batch in current] + [0] * (processes - len(current))
        if uniform:
            real = samples_per_part(sum(real), size, processes)
        if len(set(real)) > 1 or list(map(len, padded)) != real or real[0] < size:
            record[number] = tuple(real)
        yield padded[index]

    def _parts(self, source: Iterator[Batch], record: PaddingRecord) -> Iterator[Batch]:
        """Yields the part of this process of each batch."""
        processes, index = self.num_processes, self.process_index
        first = current = next(source, None)
        if first is None:
            return
        size, number = self.batch_size or len(first), 0
        while current is not None:
            upcoming = next(source, None)
            samples = len(current)
            fits = samples == size or (upcoming is None and samples < size)
            part = -(-(size if fits else samples) // processes)
            padded_size = part * processes
            if self.even_batches and samples < padded_size:
                current = pad(current, first, padded_size)
            if own := current[index * part : (index + 1) * part]:
                if samples < padded_size or padded_size < size:
                    record[number] = tuple(samples_per_part(samples, part, processes))
                yield own
                number += 1  # only batches of which this process has a part are counted
            current = upcoming


def _record_sizes(
    record: PaddingRecord, number: int, batches: list[Batch], processes: int, full: int
) -> None:
    """Records the sizes of a global batch that are not all equal, or smaller than a full batch."""
    sizes = [len(batch) for batch in batches] + [0] * (processes - len(batches))
    if len(set(sizes)) > 1 or 0 < sizes[0] < full:
        record[number] = tuple(sizes)


class SamplerShard(Sampler[Any]):
    """Shard of one process of a sampler whose items are whole batches, of which the last may be padding."""

    def __init__(self, sampler: Any, num_processes: int, process_index: int, even_batches: bool) -> None:
        self.sampler = sampler
        singles = BatchSampler(sampler, batch_size=1, drop_last=False)
        self.shard = BatchSamplerShard(singles, num_processes, process_index, even_batches=even_batches)

    @property
    def padding_record(self) -> PaddingRecord:
        """Counts by the number of the item in the latest pass, 1 for a real item and 0 for padding."""
        return self.shard.padding_record

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0)

    def iter_from(self, number: int) -> Iterator[Any]:
        """Begins a pass, and skips the first `number` items of this process."""
        batches = self.shard.iter_from(number)
        return (item for (item,) in batches)

    def __len__(self) -> int:
        return len(self.shard)


class SkipBatchSampler(BatchSampler):
    """Batch sampler that skips its first batches without reading a sample.

    Args:
        batch_sampler: The batch sampler that yields the batches.
        skip_batches: Number of batches to skip in each pass.
        kept: Number of the skipped batches, from the first one, that are still yielded, for a reader
            that pads the end of the epoch with them.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0, kept: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.kept = kept

    def __iter__(self) -> Iterator[Batch]:
        return start_at(self.batch_sampler, self.skip_batches, self.kept)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # missing while it is unpickled
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def total_length(self) -> int:
        """The number of batches before any is skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


# Passes that start at a later batch


def start_at(batch_sampler: Any, number: int, kept: int = 0) -> Iterator[Batch]:
    """Begins a pass at a later batch, in one step if possible, after the first `kept` batches."""
    if isinstance(batch_sampler, (BatchSamplerShard, SamplerShard)):
        return batch_sampler.iter_from(number)
    if isinstance(batch_sampler, SkipBatchSampler) and kept <= batch_sampler.kept:
        return start_at(batch_sampler.batch_sampler, batch_sampler.skip_batches + number, kept)
    if number and type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _SKIPS_AT_ONCE:
        return _batches_from(batch_sampler, number, kept)
    if number and type(batch_sampler) is ConstantMemorySampler:
        return _indices_from(batch_sampler, number, kept)
    source = iter(batch_sampler)
    return chain(islice(source, kept), islice(source, number - kept, None)) if number else source


def _indices_from(sampler: Sampler[int], number: int, kept: int) -> Iterator[Any]:
    """Yields the first `kept` indices of a sampler, and those from `number` on."""
    source = iter(sampler)
    yield from islice(source, kept)
    if isinstance(sampler, ConstantMemorySampler):
        source = sampler.iter_from(number)
    else:
        advance(source, number - kept)
    yield from source


def _batches_from(batch_sampler: BatchSampler, number: int, kept: int) -> Iterator[Batch]:
    """Yields the first `kept` batches of a batch sampler, and those from `number` on."""
    size = batch_sampler.batch_size
    source = _indices_from(batch_sampler.sampler, number * size, kept * size)  # type: ignore[arg-type]
    while batch := list(islice(source, size)):
        if len(batch) == size or not batch_sampler.drop_last:
            yield batch


def advance(iterator: Iterator[Any], count: int) -> None:
    """Skips items of an iterator, in one step if it is a generator that yields them from a list."""
    if count <= 0 or next(iterator, _END) is _END:
        return
    count -= 1
    inner: Any = iterator
    while isinstance(inner, GeneratorType):
        inner = inner.gi_yieldfrom
    state = inner.__reduce__() if isinstance(inner, _SEEKABLE) else ()
    if len(state) == 3 and isinstance(state[2], int) and 0 < count <= length_hint(inner):
        inner.__setstate__(state[2] + count)
    else:
        deque(islice(iterator, count), maxlen=0)


# Chains of samplers


def batch_samplers_of(index_sampler: object) -> Iterator[Any]:
    """Yields the index sampler of a loader, and each batch sampler in it."""
    while index_sampler is not None:
        yield index_sampler
        index_sampler = getattr(index_sampler, "batch_sampler", None)


def _skips(index_sampler: object) -> bool:
    return isinstance(index_sampler, SkipBatchSampler)


def shard_of(index_sampler: object) -> BatchSamplerShard | SamplerShard | None:
    """Returns the shard in a chain of samplers, or None if nothing is sharded."""
    first = next(dropwhile(_skips, batch_samplers_of(index_sampler)), None)
    return first if isinstance(first, (BatchSamplerShard, SamplerShard)) else None


def first_number(index_sampler: object) -> int:
    """Returns the number, in the whole epoch, of the first batch that a chain of samplers yields."""
    return sum(sampler.skip_batches for sampler in takewhile(_skips, batch_samplers_of(index_sampler)))
