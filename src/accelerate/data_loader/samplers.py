"""Which indices or samples each process takes: shards of samplers and datasets, and skips."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import chain, count, dropwhile, islice, takewhile
from operator import length_hint
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from accelerate.base import CheckpointError, wrong_value
from accelerate.data_loader.last_batch import Fillers, FirstRound, Tagged, fill, real_per_part
from accelerate.data_loader.permutation import BLOCK, ConstantMemorySampler, SeedableRandomSampler
from accelerate.data_loader.rank_aware import BatchJoin, OrderCheck, count_padding, pads_like_torch

if TYPE_CHECKING:
    from accelerate.data_loader.stream_check import StreamCheck

Batch = list[Any]


_END = object()
_SEEKABLE: tuple[type, ...] = (type(iter([])), type(iter(range(0))))  # can be moved to any index
_ORDER_KNOWN_AT_ONCE = frozenset({SequentialSampler, RandomSampler, SeedableRandomSampler})
_SKIPS_AT_ONCE = _ORDER_KNOWN_AT_ONCE | {ConstantMemorySampler}


def check_split(batch_size: int | None, parts: int, fix: str = "Take") -> None:
    if not batch_size or batch_size % parts:
        raise wrong_value(
            "batch_size",
            batch_size,
            f"with split_batches each batch is cut into {parts} equal parts",
            f"{fix} a multiple of {parts}, or leave split_batches off",
        )


@dataclass(eq=False, repr=False)
class BatchSamplerShard(BatchSampler):
    """The shard of one process of the batches of a batch sampler, of any kind and any batch sizes.

    Without `split_batches`, process `i` takes the `i`-th batch of each round of `num_processes` batches. With
    it, each batch is cut in `num_processes` parts and process `i` takes the `i`-th.

    The end of the epoch rarely fills a round. A sampler with a true `drop_last` loses the incomplete round.
    Else, with `even_batches`, the short end is filled with indices from the beginning of the epoch, so that
    all processes get the same number of batches of one size; without it, the short end is shared as it is and
    processes may get fewer or smaller batches. Where batch sizes vary by design, rounds are filled with whole
    batches instead.

    `fillers` says, for each batch of the latest pass that holds filler or differs in size between processes,
    how many of its indices are real on each process. `num_processes` and `process_index` may be assigned;
    with one process every batch passes unchanged.

    Args:
        batch_sampler: Iterable of lists of indices; all processes must see the same lists in the same order.
        num_processes: How many processes share the batches.
        process_index: Which of them this is, from 0.
        split_batches: Cut each batch instead of sharing whole ones.
        even_batches: Fill the short end.

    Raises:
        ConfigurationError: `split_batches` without a batch size, or with one that `num_processes` does not
            divide.
    """

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        self.batch_size = cast(int, getattr(self.batch_sampler, "batch_size", None))
        self.drop_last = bool(getattr(self.batch_sampler, "drop_last", False))
        self.fillers: Fillers = {}
        self.already_sharded = False  # the batches are those of this rank, and pass unchanged
        self.extra_batches = 0  # batches that this rank repeats until the other ranks end
        self.join: BatchJoin | None = None  # None where ranks cannot be reached
        self.order_check: OrderCheck | None = None  # where the sampler may be rank-aware
        if self.split_batches:
            check_split(self.batch_size, self.num_processes, "Give a batch sampler whose batch_size is")

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler under the batch sampler, or None where it has none."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """The number of batches of all processes together, before they are shared."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self.iter_from(0)

    def iter_from(self, number: int) -> Iterator[Batch]:
        """Begin a pass, and skip the first `number` batches of this process."""
        # Each pass has its own record, made before its first batch: two passes may run at the same time.
        self.fillers = {}
        if self.num_processes == 1:
            return start_at(self.batch_sampler, number)
        if self.already_sharded:
            return self._own_batches(number)
        if type(self.batch_sampler) is BatchSampler and type(self.sampler) is ConstantMemorySampler:
            return self._computed(self.sampler, self.fillers, number)
        if type(self.batch_sampler) is BatchSampler and type(self.sampler) in _ORDER_KNOWN_AT_ONCE:
            return self._slices(self.sampler, self.fillers, number)
        share = self._rounds if self.drop_last or not self.even_batches else self._even_rounds
        source = iter(self.batch_sampler)
        if self.order_check is not None:
            source = self.order_check.watch(source)
        batches = (self._parts if self.split_batches else share)(source, self.fillers)
        return islice(batches, number, None)

    def _own_batches(self, number: int) -> Iterator[Batch]:
        """The batches of a rank-aware batch sampler; with `even_batches` all ranks end together."""
        if pads_like_torch(self.batch_sampler):
            source = start_at(self.batch_sampler, number)
            return count_padding(source, number, self.sampler, self.batch_size, self.fillers)
        if self.join is None or not self.even_batches:
            return start_at(self.batch_sampler, number)
        return self.join.take(iter(self.batch_sampler), number, self.fillers)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.num_processes == 1:
            return batches
        if self.already_sharded:
            return batches + self.extra_batches * self.even_batches
        if self.split_batches:
            return batches - self._last_part_is_empty(batches)
        rounds, rest = divmod(batches, self.num_processes)
        if self.drop_last:
            return rounds
        return rounds + int(rest > 0 if self.even_batches else rest > self.process_index)

    def _last_part_is_empty(self, batches: int) -> bool:
        """Whether this process gets nothing of the last, short batch: only where it is not filled."""
        if self.even_batches or self.drop_last or not self.batch_size or not isinstance(self.sampler, Sized):
            return False
        last = len(self.sampler) - (batches - 1) * self.batch_size
        return 0 < last <= self.process_index * (self.batch_size // self.num_processes)

    def _slices(self, sampler: Sampler[int], fillers: Fillers, number: int) -> Iterator[Batch]:
        """The same as below for torch's own samplers, without building the batches of other processes."""
        index, (part, whole) = self.process_index, self._sizes()
        source = iter(sampler)
        length = len(sampler)  # type: ignore[arg-type]
        full, rest = divmod(length, whole)
        first = list(islice(source, min(whole, length)))
        if number:
            behind = min(number, full) * whole
            advance(source, behind - len(first))
            order = list(islice(source, length - behind))
        else:
            order = first + list(islice(source, length - len(first)))
        for start in range(index * part, len(order) - rest, whole):
            yield order[start : start + part]
        if rest and not self.drop_last and number <= full:
            yield from self._short_end(order[-rest:], first, fillers, full)
        next(source, None)  # lets the sampler end its pass

    def _computed(self, sampler: ConstantMemorySampler, fillers: Fillers, number: int) -> Iterator[Batch]:
        """The same, computing only the indices of this process, for several batches at once."""
        epoch, order, (part, whole) = sampler.epoch, sampler.order(), self._sizes()
        full, rest = divmod(len(sampler), whole)
        in_batch = torch.arange(self.process_index * part, (self.process_index + 1) * part, device="cpu")
        for start in range(number, full, step := -(-BLOCK // part)):
            rounds = torch.arange(start, min(start + step, full), device="cpu")
            yield from order(rounds[:, None] * whole + in_batch).tolist()
        if rest and not self.drop_last and number <= full:
            last, first = torch.arange(full * whole, len(sampler)), torch.arange(min(whole, len(sampler)))
            yield from self._short_end(order(last).tolist(), order(first).tolist(), fillers, full)
        sampler.end_pass(epoch)

    def _sizes(self) -> tuple[int, int]:
        """The sizes of the batch of one process and of all processes."""
        if self.split_batches:
            return self.batch_size // self.num_processes, self.batch_size
        return self.batch_size, self.batch_size * self.num_processes

    def _short_end(self, last: Batch, first: Batch, fillers: Fillers, number: int) -> Iterator[Batch]:
        """The part of this process of the last, short batch of all processes."""
        part, whole = self._sizes()
        fillers[number] = tuple(real_per_part(len(last), part, self.num_processes))
        if self.even_batches:
            last = fill(last, first, whole)
        if mine := last[self.process_index * part : (self.process_index + 1) * part]:
            yield mine

    def _rounds(self, source: Iterator[Batch], fillers: Fillers) -> Iterator[Batch]:
        """Without filler: an incomplete round is dropped, or shared as it is."""
        processes, index = self.num_processes, self.process_index
        full = self.batch_size
        for number in count():
            current = list(islice(source, processes))
            full = full or max(map(len, current), default=0)
            if self.drop_last and len(current) < processes:
                return
            if not self.drop_last:
                _note_sizes(fillers, number, current, processes, full)
            if index >= len(current):
                return
            yield current[index]

    def _even_rounds(self, source: Iterator[Batch], fillers: Fillers) -> Iterator[Batch]:
        processes, index = self.num_processes, self.process_index
        first = current = list(islice(source, processes))
        size = len(first[0]) if len(first) > 1 else max(map(len, first), default=0)
        uniform, number, sizes = True, 0, [size] * processes
        # One round is read ahead, because only the last one may be filled.
        while upcoming := list(islice(source, processes)):
            if list(map(len, current)) != sizes:
                uniform = False
                _note_sizes(fillers, number, current, processes, size)
            yield current[index]
            current, number = upcoming, number + 1
        if not current:
            return
        if number == 0 and len(current) == 1:
            size = max(size, self.batch_size or 0)
        uniform = uniform and all(len(batch) == size for batch in current[:-1]) and len(current[-1]) <= size
        whole = fill(current, first, processes)
        if uniform:  # a round of equal batches: the last indices, then those that the epoch began with
            indices = fill(chain(*current), chain(*first), size * processes)
            whole = [indices[start : start + size] for start in range(0, size * processes, size)]
        real = [len(batch) for batch in current] + [0] * (processes - len(current))
        if uniform:
            real = real_per_part(sum(real), size, processes)
        if len(set(real)) > 1 or list(map(len, whole)) != real or real[0] < size:
            fillers[number] = tuple(real)
        yield whole[index]

    def _parts(self, source: Iterator[Batch], fillers: Fillers) -> Iterator[Batch]:
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
            real = real_per_part(samples, part, processes)
            size_of_round = part * processes
            if self.even_batches and samples < size_of_round:
                current = fill(current, first, size_of_round)
            if mine := current[index * part : (index + 1) * part]:
                if samples < size_of_round or part * processes < size:
                    fillers[number] = tuple(real)
                yield mine
                number += 1  # only batches of which this process has a part are counted
            current = upcoming


class SamplerShard(Sampler[Any]):
    """The shard of one process of a sampler whose items are whole batches; `even_batches` fills the last
    round."""

    def __init__(self, sampler: Any, num_processes: int, process_index: int, even_batches: bool) -> None:
        self.sampler = sampler
        singles = BatchSampler(sampler, batch_size=1, drop_last=False)
        self.shard = BatchSamplerShard(singles, num_processes, process_index, even_batches=even_batches)

    @property
    def fillers(self) -> Fillers:
        """Number of the item in the latest pass -> 1 for each process that got a real one, 0 for a filler."""
        return self.shard.fillers

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0)

    def iter_from(self, number: int) -> Iterator[Any]:
        """Begin a pass, and skip the first `number` items of this process."""
        batches = self.shard.iter_from(number)
        return (item for (item,) in batches)

    def __len__(self) -> int:
        return len(self.shard)


class Segment(NamedTuple):
    """A part of an epoch that one number of data-parallel groups has read."""

    rounds: int  # one batch for each group
    samples: int  # of the dataset, in all rounds


@dataclass(eq=False, repr=False)
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
        self.used: tuple[Segment, ...] = ()  # parts of each pass that earlier runs have read
        self.first_round = FirstRound()
        self.stream_check: StreamCheck | None = None  # where the dataset may be rank-aware
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
        rounds, rest = divmod(max(len(self.dataset) - sum(part.samples for part in self.used), 0), whole)
        if self.drop_last:
            return rounds * self.part_size
        if self.even_batches:
            return (rounds + (rest > 0)) * self.part_size
        last = real_per_part(rest, self.part_size, self.num_processes)[self.process_index]
        return rounds * self.part_size + last

    def __iter__(self) -> Iterator[Any]:
        part, processes = self.part_size, self.num_processes
        start, stop, whole = self.process_index * part, (self.process_index + 1) * part, part * processes
        if self._seed is not None and not hasattr(self.dataset, "set_epoch"):
            self.dataset.generator.manual_seed((self._seed + self.epoch) % 2**64)
        source: Iterator[Any] = iter(self.dataset)
        if self.used:
            skip_used(source, self.used)
        if self.stream_check is not None:
            source = chain(self.stream_check.read(self.dataset, source, whole), source)
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


def skip_used(source: Iterator[Any], used: tuple[Segment, ...]) -> None:
    """Read the samples of a stream that earlier runs have read, in this worker of the loader.

    Workers take turns in yielding batches, so each of them has read its part of the rounds.

    Raises:
        CheckpointError: The stream of this worker had ended, and the others have read more than their part.
    """
    info = get_worker_info()
    workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
    parts = [(-((worker - part.rounds) // workers), part.samples // part.rounds) for part in used]
    expected = sum(rounds * size for rounds, size in parts)
    missing = expected - sum(1 for _ in islice(source, expected))
    last_size = next((size for rounds, size in reversed(parts) if rounds), 0)
    if workers > 1 and missing and missing >= last_size:
        raise CheckpointError(
            f"A loader cannot go on in the middle of this epoch: the samples of worker {worker} of {workers} "
            "had ended, and how many samples the other workers have read is not known. Go on with the same "
            "number of processes until the end of the epoch, or from a checkpoint between two epochs."
        )


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips its first batches without reading a sample.

    Args:
        batch_sampler: Where the batches come from.
        skip_batches: How many to skip at each pass.
        kept: How many of them, at the beginning, are yielded nevertheless, for a reader that fills the end of
            the epoch with them.
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


def start_at(batch_sampler: Any, number: int, kept: int = 0) -> Iterator[Batch]:
    """Begin a pass at a later batch, in one step where possible; the first `kept` batches are yielded."""
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
    """The first `kept` indices of a sampler, and those from `number` on."""
    source = iter(sampler)
    yield from islice(source, kept)
    if isinstance(sampler, ConstantMemorySampler):
        source = sampler.iter_from(number)
    else:
        advance(source, number - kept)
    yield from source


def _batches_from(batch_sampler: BatchSampler, number: int, kept: int) -> Iterator[Batch]:
    size = batch_sampler.batch_size
    source = _indices_from(batch_sampler.sampler, number * size, kept * size)  # type: ignore[arg-type]
    while batch := list(islice(source, size)):
        if len(batch) == size or not batch_sampler.drop_last:
            yield batch


def advance(iterator: Iterator[Any], count: int) -> None:
    """Skip items of an iterator: in one step where a generator yields them from a list."""
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


def _note_sizes(fillers: Fillers, number: int, batches: list[Batch], processes: int, full: int) -> None:
    """Note the sizes of a round of batches that are not all alike, or smaller than a full batch."""
    sizes = [len(batch) for batch in batches] + [0] * (processes - len(batches))
    if len(set(sizes)) > 1 or 0 < sizes[0] < full:
        fillers[number] = tuple(sizes)


def chain_of(index_sampler: Any) -> Iterator[Any]:
    """Yield what a loader reads by, and each batch sampler under it."""
    while index_sampler is not None:
        yield index_sampler
        index_sampler = getattr(index_sampler, "batch_sampler", None)


def _skips(index_sampler: Any) -> bool:
    return isinstance(index_sampler, SkipBatchSampler)


def shard_of(index_sampler: Any) -> BatchSamplerShard | SamplerShard | None:
    """Return the shard in a chain of samplers, None where nothing is sharded."""
    first = next(dropwhile(_skips, chain_of(index_sampler)), None)
    return first if isinstance(first, (BatchSamplerShard, SamplerShard)) else None


def first_number(index_sampler: Any) -> int:
    """Return the number, in the whole epoch, of the first batch that a chain of samplers yields."""
    return sum(sampler.skip_batches for sampler in takewhile(_skips, chain_of(index_sampler)))
