"""For all sizes: which samples each process sees, for every kind of loader."""

from __future__ import annotations

from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.stand_ins.streams import SizedStream
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accelerate.data_loader import GlobalBatchBuilder, prepare_data_loader

pytestmark = pytest.mark.usefixtures("states")
SETTINGS = settings(max_examples=300)
SIZES = st.integers(1, 40)
BATCH_SIZES = st.integers(1, 7)
WORLDS = st.integers(1, 3)
FLAGS = st.booleans()


class Seen(NamedTuple):
    """A batch as one process saw it, and what its loader said about it."""

    batch: list[int]
    is_last: bool
    remainder: int
    counts: tuple[int, ...] | None


class Batches(list[list[int]]):
    batch_size: int | None = None


class OwnBatchSampler(BatchSampler):
    """Like torch's, but not known to be."""


def read(loader: DataLoader[Any], guess: bool = False, **config: Any) -> list[Seen]:
    prepared: Any = prepare_data_loader(loader, **config)
    seen = [
        Seen(batch.tolist(), prepared.end_of_dataloader, prepared.remainder, prepared.valid_counts)
        for batch in prepared
    ]
    # Which of any parts are empty is not known before they are read.
    assert len(seen) == len(prepared) or (guess and len(seen) < len(prepared))
    assert [one.is_last for one in seen] == [False] * (len(seen) - 1) + [True] * bool(seen)
    return seen


def read_on_all(make: Any, world: int, **config: Any) -> list[list[Seen]]:
    return [read(make(), num_processes=world, process_index=rank, **config) for rank in range(world)]


def batches_of(ranks: list[list[Seen]]) -> list[list[list[int]]]:
    return [[one.batch for one in seen] for seen in ranks]


def chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def test_ranks_have_the_sizes_of_all_shards() -> None:
    """Without filling, every rank that has a batch knows how many samples each of the others has."""
    ranks = read_on_all(lambda: DataLoader(list(range(7)), batch_size=2), 2, even_batches=False)
    assert [one.counts for one in ranks[0]] == [None, (2, 1)]
    varied = read_on_all(lambda: DataLoader(list(range(6)), batch_sampler=[[0], [1, 2], [3, 4, 5]]), 2)
    assert [one.counts for one in varied[0]] == [(1, 2), (3, 0)]


def real_samples(ranks: list[list[Seen]]) -> list[int]:
    """The samples of all global batches without the padding of each rank."""
    found = []
    for step in zip(*ranks, strict=True):
        assert len({one.counts for one in step}) == 1
        counts = step[0].counts or [len(one.batch) for one in step]
        found += chain.from_iterable(one.batch[:count] for one, count in zip(step, counts, strict=True))
    return found


def expected_batches(
    order: list[int], batch_size: int, world: int, split: bool, drop_last: bool, even: bool
) -> list[Any]:
    """The rule: make global batches of `whole` places, and cut each in one part for each rank."""
    whole = batch_size if split or world == 1 else batch_size * world
    part = whole // world
    global_batches = chunks(order, whole)
    if len(global_batches[-1]) < whole and drop_last:
        global_batches.pop()
    elif len(global_batches[-1]) < whole and even and world > 1:
        global_batches[-1] = list(islice(chain(global_batches[-1], cycle(order)), whole))
    parts = [[one[rank * part : (rank + 1) * part] for one in global_batches] for rank in range(world)]
    return [[batch for batch in batches if batch] for batches in parts]


@SETTINGS
@given(SIZES, BATCH_SIZES, WORLDS, FLAGS, FLAGS, FLAGS, FLAGS, FLAGS)
def test_map_style_data(
    size: int,
    batch_size: int,
    world: int,
    split: bool,
    shuffle: bool,
    drop_last: bool,
    even: bool,
    known: bool,
) -> None:
    if split:
        batch_size *= world  # a batch that cannot be cut evenly is refused, see the unit tests

    def make() -> DataLoader[Any]:
        data = list(range(size))
        if known:
            return DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
        sampler = RandomSampler(data) if shuffle else SequentialSampler(data)
        return DataLoader(data, batch_sampler=OwnBatchSampler(sampler, batch_size, drop_last))

    seeded = {"use_seedable_sampler": True, "data_seed": 7}
    order = list(
        chain.from_iterable(
            batches_of(read_on_all(lambda: DataLoader(list(range(size)), 1, shuffle), 1, **seeded))[0]
        )
    )
    assert sorted(order) == list(range(size))
    assert shuffle or order == list(range(size))
    ranks = read_on_all(make, world, split_batches=split, even_batches=even, **seeded)
    assert batches_of(ranks) == expected_batches(order, batch_size, world, split, drop_last, even)
    if drop_last:
        assert all(one.counts is None and one.remainder == -1 for one in chain.from_iterable(ranks))
    elif even:
        assert real_samples(ranks) == order
        assert world == 1 or {len(one.batch) for one in chain.from_iterable(ranks)} == {
            batch_size // (world if split else 1)
        }
        whole = batch_size * (1 if split else world)
        assert {seen[-1].remainder for seen in ranks} == {size % whole}
    else:
        assert sorted(chain.from_iterable(one.batch for one in chain.from_iterable(ranks))) == sorted(order)


@SETTINGS
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), WORLDS, FLAGS, FLAGS)
def test_batches_of_any_size(sizes: list[int], world: int, split: bool, even: bool) -> None:
    """A batch sampler without a batch size, or with one that it does not keep: any sizes."""
    indices = iter(range(sum(sizes)))
    batches = Batches(list(islice(indices, size)) for size in sizes)
    if split:
        batches.batch_size = 2 * world

    def make() -> DataLoader[Any]:
        return DataLoader(list(range(sum(sizes))), batch_sampler=batches)

    ranks = read_on_all(make, world, guess=split and not even, split_batches=split, even_batches=even)
    if even:
        assert len({len(seen) for seen in ranks}) == 1
        assert real_samples(ranks) == list(range(sum(sizes)))
        if split:
            assert all(len({len(one.batch) for one in step}) == 1 for step in zip(*ranks, strict=True))
    else:
        for rank, seen_here in enumerate(ranks):
            assert all(one.counts is None or one.counts[rank] == len(one.batch) for one in seen_here)
        seen = sorted(chain.from_iterable(one.batch for one in chain.from_iterable(ranks)))
        assert seen == list(range(sum(sizes)))


@SETTINGS
@given(SIZES, BATCH_SIZES, WORLDS, FLAGS, FLAGS, FLAGS)
def test_iterable_data(
    size: int, batch_size: int, world: int, split: bool, drop_last: bool, even: bool
) -> None:
    if split:
        batch_size *= world
    ranks = read_on_all(
        lambda: DataLoader(SizedStream(size), batch_size=batch_size, drop_last=drop_last),
        world,
        split_batches=split,
        even_batches=even,
    )
    assert batches_of(ranks) == expected_batches(list(range(size)), batch_size, world, split, drop_last, True)
    if not drop_last:
        assert real_samples(ranks) == list(range(size))


@SETTINGS
@given(SIZES, st.integers(1, 4), FLAGS)
def test_items_that_are_whole_batches(size: int, world: int, even: bool) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader([torch.tensor([i, i]) for i in range(size)], batch_size=None)

    ranks = read_on_all(make, world, even_batches=even)
    doubled = [i for i in range(size) for _ in range(2)]
    if even:
        assert real_samples(ranks) == doubled
    else:
        assert sorted(chain.from_iterable(one.batch for one in chain.from_iterable(ranks))) == doubled


@SETTINGS
@given(SIZES, BATCH_SIZES, st.integers(1, 4), FLAGS, FLAGS)
def test_global_batches_have_the_samples_of_the_source(
    size: int, batch_size: int, groups: int, split: bool, drop_last: bool
) -> None:
    batches = [torch.tensor(chunk) for chunk in chunks(list(range(size)), batch_size)]
    if drop_last and len(batches[-1]) < batch_size:
        batches.pop()
    global_batches = list(GlobalBatchBuilder(groups, split, drop_last).build(iter(batches)))
    *earlier, last = [one.is_last for one in global_batches] or [True]
    assert last
    assert not any(earlier)
    real = []
    for one in global_batches:
        parts = [part.tolist() for part in one.parts]
        assert len(set(map(len, parts))) == 1
        counts = one.counts or list(map(len, parts))
        real += chain.from_iterable(part[:count] for part, count in zip(parts, counts, strict=True))
    whole = batch_size if split else batch_size * groups
    assert real == list(range(size - size % whole if drop_last else size))
