"""An order that is computed: a permutation, uniform enough, the same memory at any size, at any position."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from accelerate.base import ConfigurationError
from accelerate.data_loader import (
    BatchSamplerShard,
    ConstantMemorySampler,
    IndexPermutation,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)

pytestmark = pytest.mark.usefixtures("states")
BILLION = 10**9
FEISTEL = 4099  # indices: more than are drawn from a table
BINS = 16


class Huge(Dataset[Any]):
    def __init__(self, samples: int = BILLION) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def prepare(dataset: Any, world: int = 1, rank: int = 0, **settings: Any) -> Any:
    loader = DataLoader(dataset, **{"batch_size": 8, "shuffle": True, **settings})
    return prepare_data_loader(
        loader, None, world, rank, use_constant_memory_sampler=True, data_seed=5, put_on_device=True
    )


def read(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in batch.reshape(-1).tolist()]


def take(loader: Any) -> list[Any]:
    with closing(iter(loader)) as batches:
        return list(islice(batches, 3))


def chi_square(counts: torch.Tensor) -> float:
    """The statistic of counts that should be equal, in standard deviations from its mean."""
    expected, freedom = counts.sum() / counts.numel(), counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def test_lengths_next_to_a_power_of_two_or_a_square_are_permuted() -> None:
    for length in (1, 2, 4095, 4096, 4097, 4225, 65535, 65536, 65537):
        order = IndexPermutation(length, length)(torch.arange(length))
        assert torch.equal(order.sort().values, torch.arange(length))


def test_each_index_is_equally_likely_at_each_position() -> None:
    """Over many seeds, for the first positions and for a table of positions and indices."""
    counts, first = torch.zeros(BINS, BINS), torch.zeros(BINS)
    positions = torch.arange(FEISTEL)
    for seed in range(300):
        bins = IndexPermutation(FEISTEL, seed)(positions) * BINS // FEISTEL
        counts += torch.bincount(positions * BINS // FEISTEL * BINS + bins, minlength=BINS**2).view(
            BINS, BINS
        )
        first[bins[0]] += 1
    assert abs(chi_square(counts)) < 4
    assert abs(chi_square(first)) < 4


def test_neighbours_in_the_order_are_independent() -> None:
    """The distance between neighbours is equally likely to be any; that of 1 is as rare as the others."""
    distances, ones = torch.zeros(64), 0
    for seed in range(300):
        order = IndexPermutation(FEISTEL, seed)(torch.arange(FEISTEL))
        steps = order.diff() % FEISTEL
        ones += int((steps == 1).sum())
        distances += torch.bincount((steps - 1) * 64 // (FEISTEL - 1), minlength=64)
    assert abs(chi_square(distances)) < 4
    assert abs(ones - 300) < 4 * 300**0.5


def test_neighbouring_seeds_and_far_seeds_give_other_orders() -> None:
    positions = torch.arange(FEISTEL)
    orders = [IndexPermutation(FEISTEL, seed)(positions) for seed in (0, 1, -1, 2**32, 2**63, 2**63 + 1)]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert int((order == other).sum()) < 10  # one in the mean
    assert torch.equal(IndexPermutation(FEISTEL, 2**64 + 1)(positions), orders[1])


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("settings", [{}, {"batch_size": None}, {"batch_size": 10_000}])
def test_the_order_of_a_billion_samples_is_not_stored(
    world: int, rank: int, settings: dict[str, Any]
) -> None:
    """Its list of indices would take 8 GB; neither the beginning nor the middle of an epoch stores it."""
    loader = prepare(Huge(), world, rank, **settings)
    batches = 100_000_000 // (settings.get("batch_size", 8) or 1)
    tracemalloc.start()
    try:
        begun = take(loader)
        late = take(skip_first_batches(loader, batches))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert begun
    assert late
    assert peak < 4 * 2**20


@pytest.mark.parametrize("size", [1, 50, 9000])
@pytest.mark.parametrize("skipped", [1, 5, 600])
@pytest.mark.parametrize("settings", [{}, {"batch_size": None}, {"drop_last": True}])
def test_skipping_batches_starts_the_order_at_that_position(
    size: int, skipped: int, settings: dict[str, Any]
) -> None:
    whole, late = (
        prepare(Huge(size), **settings),
        skip_first_batches(prepare(Huge(size), **settings), skipped),
    )
    assert list(map(str, late)) == list(map(str, whole))[skipped:]


def test_shards_compute_their_own_indices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0
    permute = IndexPermutation.__call__

    def count(self: IndexPermutation, positions: torch.Tensor) -> torch.Tensor:
        nonlocal computed
        computed += positions.numel()
        return permute(self, positions)

    monkeypatch.setattr(IndexPermutation, "__call__", count)
    assert len(read(prepare(Huge(80_000), 4, 3))) == 20_000
    assert computed == 20_000


def test_the_order_depends_on_seed_and_epoch() -> None:
    loader = prepare(Huge(9000))
    epochs = [read(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    late = prepare(Huge(9000))
    late.set_epoch(2)
    assert read(late) == epochs[2]
    assert loader.iteration == late.iteration == 3


def test_the_seed_of_the_users_generator_is_kept() -> None:
    loader = DataLoader(range(50), shuffle=True, generator=torch.Generator().manual_seed(8))  # type: ignore
    sampler = get_sampler(prepare_data_loader(loader, use_constant_memory_sampler=True))
    assert (type(sampler), sampler.initial_seed) == (ConstantMemorySampler, 8)


@pytest.mark.parametrize("shard", [False, True])
def test_a_sampler_advances_to_the_next_epoch_after_each_pass(shard: bool) -> None:
    sampler = ConstantMemorySampler(range(5000), data_seed=1)
    batches: Any = BatchSampler(sampler, 7, drop_last=False)
    source = BatchSamplerShard(batches, 2, 0) if shard else batches
    first, second = list(source), list(source)
    assert first != second
    assert sampler.epoch == 2


@pytest.mark.parametrize("samples", [100, 5000, 12_000])
def test_a_number_of_samples_is_part_of_one_permutation_or_several(samples: int) -> None:
    sampler = RandomSampler(range(5000), num_samples=samples)
    order = read(prepare(range(5000), sampler=sampler, shuffle=False))
    assert len(order) == samples
    for start in range(0, samples, 5000):
        assert len(set(order[start : start + 5000])) == min(5000, samples - start)
    assert order[:5000] != order[5000:10_000]


@pytest.mark.parametrize("world", [1, 2])
def test_other_samplers_stay(world: int) -> None:
    class Own(RandomSampler):
        pass

    for sampler in (Own(range(20)), WeightedRandomSampler([1.0] * 20, 20)):
        assert type(get_sampler(prepare(range(20), world, sampler=sampler, shuffle=False))) is type(sampler)
    assert read(prepare(range(20), shuffle=False)) == list(range(20))


def test_drawing_with_replacement_is_refused() -> None:
    sampler = RandomSampler(range(20), replacement=True)
    with pytest.raises(ConfigurationError, match=r"replacement=True.*use_constant_memory_sampler=False"):
        prepare(range(20), sampler=sampler, shuffle=False)
