"""Iterable datasets that shard themselves: which do, how, and how ranks end together on uneven shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerate.base import PreparationError
from accelerate.data_loader.last_batch import (
    Counts,
    Fillers,
    FirstRound,
    count_samples,
    first_samples,
    join,
)
from accelerate.ops import Transport

_DEPTH = 12
_END = object()


class OwnShare(NamedTuple):
    """The shard of a group that a dataset makes itself.

    Attributes:
        is_given: Whether the user has sharded the dataset, so that no rank can read the whole.
    """

    dataset: Any
    why: str
    is_given: bool = False


def own_share(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Return the shard of one group in a dataset that shards itself; None for one that does not.

    All shares together are the dataset, each sample once; they may differ in length.
    """
    shares = (shard(dataset, groups, group) for shard in _SHARDINGS)
    return next((share for share in shares if share is not None), None)


def is_the_same_everywhere(dataset: Any, transport: Transport) -> bool:
    """Whether a dataset yields the same samples in the same order on all ranks; called on all of them.

    Datasets differ by random generators with different seeds: all generators in the dataset are compared, and
    the number of its shards.
    """
    mine = (_num_shards(dataset), [_state_of(generator) for generator in _generators_within(dataset)])
    return all(other == mine for other in transport.gather_object(mine))


class Join:
    """Joins ranks with uneven shares: each takes a batch in every round, as long as any rank has one.

    The batch of a rank that has fewer samples than the others in a round, or none, is filled from the first
    batch of its share. One small collective in each round exchanges how many samples each rank has; it runs
    for the next round before a batch is yielded, so every rank knows which batch is the last.

    Args:
        first_round: Its item is the first batch of this rank's share in the epoch; empty where that is not
            read yet.
        fills_short: Whether a short batch is filled; otherwise only a missing one is replaced.
        drop_last: End when the first rank does, instead of filling.
    """

    def __init__(
        self,
        transport: Transport,
        group_of: Sequence[int],
        first_round: FirstRound,
        *,
        fills_short: bool,
        drop_last: bool,
    ) -> None:
        self._transport = transport
        self._first_ranks = [group_of.index(group) for group in sorted(set(group_of))]
        self._fills_short = fills_short
        self._goes_on: Callable[[Counts], bool] = all if drop_last else any
        self._first_round = first_round

    def take(
        self,
        batches: Iterator[Any],
        capture: Callable[[], Any] | None,
        keep: Callable[[Any], None],
        number: int,
        fillers: Fillers,
    ) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of this rank, each with whether it is the last one.

        Args:
            capture: Captures the state of the source behind the batch just read; None: it has none.
            fillers: Filled with the real samples of each rank, for batches where they differ and the last.
        """
        current = next(batches, _END)
        if begins := not self._first_round.items:
            self._first_round.items = [current]
        state = capture() if capture else None
        counts = self._exchange(current)
        if begins and self._goes_on is any:
            _refuse_empty_shares(counts)
        while self._goes_on(counts):
            upcoming = next(batches, _END)
            # Behind its end a share would begin anew: a rank without batches keeps the state before its end.
            upcoming_state = capture() if capture and upcoming is not _END else state
            upcoming_counts = self._exchange(upcoming)
            is_last = not self._goes_on(upcoming_counts)
            if capture:
                keep(capture() if is_last else state)
            if is_last or len(set(counts)) > 1:
                fillers[number] = counts
            yield self._filled(current, counts), is_last
            current, state, counts = upcoming, upcoming_state, upcoming_counts
            number += 1

    def _exchange(self, batch: Any) -> Counts:
        """The samples of this round's batch on each group; a batch that cannot be counted is one."""
        samples = 0 if batch is _END else count_samples(batch)
        gathered = self._transport.gather(torch.tensor([1 if samples is None else samples])).tolist()
        return tuple(gathered[rank] for rank in self._first_ranks)

    def _filled(self, batch: Any, counts: Counts) -> Any:
        first = self._first_round.items
        if not self._fills_short:
            return first[0] if batch is _END else batch
        real = [] if batch is _END else [batch]
        missing = max(counts) - sum(count_samples(batch) or 1 for batch in real)
        return join([*real, *first_samples(first, missing)])


def _refuse_empty_shares(counts: Counts) -> None:
    empty = [group for group, count in enumerate(counts) if not count]
    if empty and any(counts):
        raise PreparationError(
            f"The dataset shards itself, and the shares {empty} of {len(counts)} are empty, so that "
            "there is nothing to fill their batches with. Give the dataset at least as many shards as there "
            "are processes, or prepare its loader with dispatch_batches=True."
        )


def _by_datasets(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Streams of the library `datasets`: by their files, or by every n-th sample."""
    if not type(dataset).__module__.startswith("datasets."):
        return None
    given = getattr(dataset, "_distributed", None)
    if given is not None:
        is_ours = (given.rank, given.world_size) == (group, groups)
        return OwnShare(dataset, "sharded by split_dataset_by_node", True) if is_ours else None
    from datasets.distributed import split_dataset_by_node

    share = split_dataset_by_node(dataset, rank=group, world_size=groups)
    return OwnShare(share, "the dataset shards itself, by split_dataset_by_node")


def _by_webdataset(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Pipelines of the library `webdataset` in which a stage takes the shards of this process."""
    stages = getattr(dataset, "pipeline", None)
    if not type(dataset).__module__.startswith("webdataset.") or not isinstance(stages, list):
        return None
    splits = any(getattr(stage, "__name__", None) == "split_by_node" for stage in stages)
    return OwnShare(dataset, "sharded by split_by_node", True) if splits else None


def _by_shards(dataset: Any, groups: int, group: int) -> OwnShare | None:
    """Datasets with `shard(num_shards=, index=)` that have at least as many shards as there are groups."""
    shard, num_shards = getattr(dataset, "shard", None), _num_shards(dataset)
    if not callable(shard) or num_shards is None or num_shards < groups:
        return None
    return OwnShare(shard(num_shards=groups, index=group), f"the dataset has {num_shards} shards")


_SHARDINGS: tuple[Callable[[Any, int, int], OwnShare | None], ...] = (
    _by_datasets,
    _by_webdataset,
    _by_shards,
)
"""How datasets shard themselves; the first that returns a share is used."""


def _num_shards(dataset: Any) -> int | None:
    for name in ("num_shards", "n_shards"):
        number = getattr(dataset, name, None)
        if isinstance(number, int):
            return number
    return None


def _generators_within(dataset: Any) -> list[Any]:
    """The random generators that a dataset, or what it is made of, holds."""
    package = type(dataset).__module__.partition(".")[0]
    kinds = tuple(_state_getters())
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> Iterator[Any]:
        if depth > _DEPTH or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, kinds):
            yield value
            return
        for part in _parts_of(value, package):
            yield from walk(part, depth + 1)

    return list(walk(dataset, 0))


def _parts_of(value: Any, package: str) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    is_of_the_dataset = type(value).__module__.partition(".")[0] == package
    return list(vars(value).values()) if is_of_the_dataset and hasattr(value, "__dict__") else []


@cache
def _state_getters() -> dict[type, Callable[[Any], Any]]:
    """Kind of generator -> what returns its state; numpy loads its own kinds here."""
    return {
        torch.Generator: lambda generator: generator.get_state().tolist(),
        random.Random: lambda generator: generator.getstate(),
        np.random.Generator: lambda generator: repr(generator.bit_generator.state),
        np.random.RandomState: lambda generator: repr(generator.get_state()),
    }


def _state_of(generator: Any) -> Any:
    getters = _state_getters().items()
    return next(get_state(generator) for kind, get_state in getters if isinstance(generator, kind))
