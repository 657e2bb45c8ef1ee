"""Rank-aware loaders, whose sampler, batch sampler or dataset already yields the shard of its rank.

`prepare.py` and `existing_shards.py` check whether a loader is rank-aware. `BatchSamplerShard` reads through
the `SamplerJoin` and the `OrderCheck` that `prepare.py` sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from accelerate.base import ConfigurationError, PreparationError, wrong_value
from accelerate.data_loader.last_batch import Counts, PaddingRecord, length_of
from accelerate.ops import Transport

STRICT = ("num_replicas", "rank")
"""Attributes of torch's DistributedSampler, of which other values than those of the run are an error."""
ATTRIBUTES = (
    STRICT,
    ("world_size", "rank"),
    ("dp_size", "rank"),
    ("data_parallel_size", "data_parallel_rank"),
    ("num_processes", "process_index"),
)
"""Names of the attributes with the number of ranks and the rank of a sampler or dataset."""
EXPLICIT = "already_sharded=True keeps the loader of each rank as it is; already_sharded=False shards it."


class RankAttributes(NamedTuple):
    """Number of ranks and rank that a sampler or dataset has as attributes."""

    owner: Any
    names: tuple[str, str]
    size: int
    rank: int

    def __str__(self) -> str:
        values = f"{self.names[0]}={self.size}, {self.names[1]}={self.rank}"
        return f"{type(self.owner).__name__}({values})"


def nested_samplers(index_sampler: object) -> Iterator[Any]:
    """Yields a sampler and all samplers and batch samplers in it, each once, the outermost first."""
    waiting, visited = [index_sampler], set[int]()
    while waiting:
        owner = waiting.pop(0)
        if owner is None or id(owner) in visited:
            continue
        visited.add(id(owner))
        yield owner
        waiting += [getattr(owner, name, None) for name in ("batch_sampler", "sampler")]
        waiting += [value for value in getattr(owner, "__dict__", {}).values() if isinstance(value, Sampler)]


def nested_datasets(dataset: object) -> Iterator[Any]:
    """Yields a dataset and, from its attributes, all datasets and iterables of its package, each once."""
    package = _package(dataset)
    waiting, visited = [dataset], set[int]()
    while waiting:
        owner = waiting.pop(0)
        if id(owner) in visited:
            continue
        visited.add(id(owner))
        yield owner
        for value in getattr(owner, "__dict__", {}).values():
            parts = value if isinstance(value, (list, tuple)) else (value,)
            belongs = (hasattr(type(part), "__iter__") and _package(part) == package for part in parts)
            waiting += [
                part for part, own in zip(parts, belongs, strict=True) if own or isinstance(part, Dataset)
            ]


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def find_rank_attributes(owners: Iterable[Any]) -> list[RankAttributes]:
    """Returns the rank attributes of samplers or datasets, without those of a single rank."""
    found = []
    for owner in owners:
        for names in ATTRIBUTES:
            size, rank = (getattr(owner, name, None) for name in names)
            if isinstance(size, Integral) and isinstance(rank, Integral) and int(size) > 1:
                found.append(RankAttributes(owner, names, int(size), int(rank)))
                break
    return found


def has_own_shard(index_sampler: object, dataset: object) -> bool:
    """Returns whether a sampler or dataset of a loader has the number of ranks and its rank."""
    return bool(find_rank_attributes([*nested_samplers(index_sampler), *nested_datasets(dataset)]))


def match_ranks(loader: DataLoader[Any], groups: int, group: int, transport: Transport | None) -> str | None:
    """Returns the reason why a loader is rank-aware in this run, or None if it is not known to be.

    Called on all ranks, which agree.

    Args:
        groups: Number of data-parallel ranks.
        transport: The transport that connects the ranks; None if they cannot be reached.

    Raises:
        ConfigurationError: If `num_replicas` and `rank` of a sampler or dataset are not those of this run.
    """
    owners = list(nested_samplers(loader._index_sampler))
    if isinstance(loader.dataset, IterableDataset):
        owners = list(nested_datasets(loader.dataset))
        owners += [getattr(inner, "_distributed", None) for inner in owners[1:]]  # streams of `datasets`
    attributes = find_rank_attributes(owners)
    if not attributes:
        return None
    matching = [found for found in attributes if (found.size, found.rank) == (groups, group)]
    other = [found for found in attributes if found.names == STRICT and found not in matching]
    own = (_format_mismatch(other[0], groups, group) if other else None, bool(matching))
    results = [own] if transport is None else transport.gather_object(own)
    for error, _ in results:
        if error is not None:
            raise ConfigurationError(error)
    return f"by its {matching[0]}" if all(matches for _, matches in results) else None


def _format_mismatch(found: RankAttributes, groups: int, group: int) -> str:
    return (
        f"{found}: this process is data-parallel rank {group} of {groups}, so the shards of this loader do "
        f"not fit the run. Use num_replicas={groups} and rank={group}, or leave the sharding to prepare. "
        f"{EXPLICIT}"
    )


def check_settings(loader: DataLoader[Any], why: str, *, split: bool, dispatch: bool | None) -> None:
    """Raises an error if settings contradict that each rank reads its own loader."""
    if dispatch:
        raise wrong_value(
            "dispatch_batches",
            dispatch,
            f"the loader is already sharded ({why}), and rank 0 would read its shard only",
            f"leave dispatch_batches off. {EXPLICIT}",
        )
    if (
        split
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is not BatchSampler
    ):
        raise wrong_value(
            "split_batches",
            split,
            f"the loader is already sharded ({why}), and each batch of its batch sampler is for one rank",
            f"leave split_batches off. {EXPLICIT}",
        )


# Padding of samplers


def padding_of(loader: DataLoader[Any]) -> int:
    """Returns the number of indices of an epoch, over all ranks, that repeat others, or 0 if it is not known.

    Samplers like `DistributedSampler` have a `total_size`, which is a multiple of the number of ranks.
    """
    for found in find_rank_attributes(nested_samplers(loader._index_sampler)):
        total = getattr(found.owner, "total_size", None)
        samples = length_of(getattr(found.owner, "dataset", loader.dataset))
        if isinstance(total, int) and samples is not None and 0 < total - samples < found.size:
            return total - samples
    return 0


def pads_like_torch(batch_sampler: object) -> bool:
    """Returns whether batches are those of torch's `DistributedSampler`, of known padding."""
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler or not isinstance(sampler, DistributedSampler):
        return False
    return all(
        getattr(type(sampler), name) is getattr(DistributedSampler, name) for name in ("__iter__", "__len__")
    )


def count_padding(
    batches: Iterator[Any], number: int, sampler: Any, size: int, padding_record: PaddingRecord
) -> Iterator[Any]:
    """Yields the batches of torch's `DistributedSampler` from batch `number` on, and records their padding.

    The sampler pads the end of its order with the beginning, and rank `r` of `n` reads every `n`-th index
    from `r` on.
    """
    length, ranks = len(sampler), sampler.num_replicas
    real = [min(length, -(-max(len(sampler.dataset) - rank, 0) // ranks)) for rank in range(ranks)]
    for index, batch in enumerate(batches, number):
        counts = tuple(min(max(samples - index * size, 0), len(batch)) for samples in real)
        if min(counts) < len(batch) or (index + 1) * size >= length:
            padding_record[index] = counts
        yield batch


# Ranks that end together


@dataclass(frozen=True)
class SamplerJoin:
    """Join of the ranks of a rank-aware batch sampler, which may yield different numbers of batches.

    A rank without a batch repeats its first batch while another rank has one. One small collective for each
    batch exchanges the numbers of samples. It runs when indices are drawn, before the batch is read.

    Args:
        drop_last: Whether to end with the first rank that ends, instead of repeating batches.
        padding: Number of indices of an epoch, over all ranks, that repeat others to make ranks equal.
    """

    transport: Transport
    group: int
    drop_last: bool
    padding: int = 0

    def take(self, source: Iterator[Any], number: int, padding_record: PaddingRecord) -> Iterator[Any]:
        """Yields the batches of this rank from batch `number` on, and records the samples of all ranks."""
        first = current = next(source, None)
        for _ in range(number):
            current = next(source, None)
        counts = self._exchange(current)
        if not number and not self.drop_last:
            _check_no_rank_is_empty(counts)
        while self._goes_on(counts):
            if len(set(counts)) > 1:
                padding_record[number] = counts
            yield first if current is None else current
            last, last_counts = current, counts
            current = next(source, None)
            counts = self._exchange(current)
            if not self._goes_on(counts):
                padding_record[number] = self._without_repeats(first if number else None, last, last_counts)
            number += 1

    def _goes_on(self, counts: Counts) -> bool:
        return all(counts) if self.drop_last else any(counts)

    def _exchange(self, batch: Any) -> Counts:
        """Returns the samples of the batch on each data-parallel rank, 0 without a batch."""
        samples = 0 if batch is None else max(len(batch), 1)
        rows = self.transport.gather(torch.tensor([[self.group, samples]])).tolist()
        return tuple(count for _, count in sorted(dict(rows).items()))

    def _without_repeats(self, first: Any, last: Any, counts: Counts) -> Counts:
        """Returns the counts of the last batches without the indices at their ends that pad the epoch.

        Padding repeats indices of the beginning. Only indices that are also in a first batch, or in the last
        batch of another rank, are therefore not counted.
        """
        if not self.padding:
            return counts
        lists = [None if batch is None else list(map(plain_index, batch)) for batch in (first, last)]
        batches = dict(self.transport.gather_object((self.group, lists)))
        occurrences = Counter(index for pair in batches.values() for batch in pair for index in batch or ())
        real, padding = list(counts), self.padding
        for group in sorted(batches, reverse=True):
            indices = batches[group][1] or []
            while padding and indices and occurrences[indices[-1]] > 1:
                occurrences[indices.pop()] -= 1
                real[group], padding = real[group] - 1, padding - 1
        return tuple(real)


def _check_no_rank_is_empty(counts: Counts) -> None:
    empty = [rank for rank, count in enumerate(counts) if not count]
    if empty and any(counts):
        raise PreparationError(
            f"The loader is already sharded, and the shards of ranks {empty} of {len(counts)} are empty, so "
            "there is no batch that they can repeat until the other ranks end. Give each rank at least one "
            "batch, or set even_batches=False and call no collective in the loop."
        )


# Loaders that may be rank-aware


def plain_index(index: object) -> Any:
    """Returns an index as a number, a string, or a tuple of these, which can be compared and sent."""
    if isinstance(index, Integral):
        return int(index)
    if isinstance(index, torch.Tensor) and index.ndim == 0:
        return index.item()
    if isinstance(index, (list, tuple)):
        return tuple(map(plain_index, index))
    return index if isinstance(index, (str, float)) else type(index).__qualname__


@dataclass(eq=False)
class OrderCheck:
    """Comparison of the first batch of indices over all ranks.

    Args:
        name: Name of the class of the sampler.
        once: Whether to compare in the first pass only. The order of an unknown sampler may depend on random
            generators, whose states may come to differ between ranks.
    """

    transport: Transport
    name: str
    once: bool
    is_done: bool = False

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches, and compares the first one over all ranks.

        Raises:
            PreparationError: If ranks begin with different indices.
        """
        first = next(batches, None)
        if not self.is_done:
            self.is_done = self.once
            self._compare(first)
        if first is not None:
            yield first
            yield from batches

    def _compare(self, batch: Any) -> None:
        own = None if batch is None else plain_index(list(batch))
        firsts = self.transport.gather_object(own)
        if any(first != firsts[0] for first in firsts):
            rank = next(rank for rank, first in enumerate(firsts) if first != firsts[0])
            raise PreparationError(
                f"{self.name} begins with {_format_batch(firsts[0])} on rank 0 and with "
                f"{_format_batch(firsts[rank])} on rank {rank}. prepare shards one order, which must be the "
                "same on all ranks; otherwise samples are lost and repeated. If the sampler yields the shard "
                "of its rank, prepare the loader with already_sharded=True. If it shuffles, give it a "
                "generator of its own, with an equal seed on all ranks."
            )


def _format_batch(batch: Any) -> str:
    text = "nothing" if batch is None else repr(list(batch))
    return text if len(text) < 60 else f"{text[:56]} ..."
