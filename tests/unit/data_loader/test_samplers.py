"""The samplers by themselves."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate.base import ConfigurationError
from accelerate.data_loader import BatchSamplerShard, SamplerShard, SeedableRandomSampler, SkipBatchSampler


def in_order(size: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(size)), batch_size, drop_last)


def test_seedable_order_is_a_function_of_seed_and_epoch() -> None:
    first = SeedableRandomSampler(range(20), data_seed=3)
    second = SeedableRandomSampler(range(20), data_seed=3)
    epochs = [list(first) for _ in range(3)]
    assert len({tuple(order) for order in epochs}) == 3
    for epoch in (2, 0, 1):
        second.set_epoch(epoch)
        assert list(second) == epochs[epoch]
        assert second.epoch == epoch + 1


def test_seedable_takes_the_seed_torch_was_given() -> None:
    torch.manual_seed(11)
    torch.rand(5)
    sampler = SeedableRandomSampler(range(5))
    assert sampler.initial_seed == 11
    assert isinstance(sampler, RandomSampler)


def test_a_pass_left_early_does_not_advance_the_epoch() -> None:
    sampler = SeedableRandomSampler(range(50), data_seed=1)
    iterator = iter(sampler)
    head = [next(iterator) for _ in range(5)]
    assert list(sampler)[:5] == head
    assert sampler.epoch == 1


def test_an_epoch_chosen_during_a_pass_is_the_next_one() -> None:
    sampler = SeedableRandomSampler(range(5), data_seed=1)
    for number, _ in enumerate(sampler):
        if number == 2:
            sampler.set_epoch(7)
    assert sampler.epoch == 7


def test_two_iterators_of_one_sampler_are_independent() -> None:
    sampler = SeedableRandomSampler(range(40), replacement=True, num_samples=90, data_seed=5)
    whole = list(sampler)
    sampler.set_epoch(0)
    pairs = list(zip(sampler, sampler, strict=True))
    assert [first for first, _ in pairs] == whole
    assert [second for _, second in pairs] == whole


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, -1])
def test_any_integer_is_a_valid_seed(size: int) -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=size)
    for epoch in range(2):  # the seed and the epoch wrap around together
        same = SeedableRandomSampler(range(20), data_seed=(size + epoch) % 2**64)
        assert list(sampler) == list(same)


def test_a_shard_records_where_its_fillers_are() -> None:
    shard = BatchSamplerShard(in_order(10, 4), 2, 1)
    assert list(shard) == [[4, 5, 6, 7], [2, 3, 4, 5]]
    assert shard.padding_record == {1: (2, 0)}
    assert shard.total_length == 3
    assert list(BatchSamplerShard(in_order(16, 4), 2, 1)) == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_fillers_belong_to_one_pass() -> None:
    shard = BatchSamplerShard(in_order(5, 2), 2, 0)
    first = iter(shard)
    padding_record = shard.padding_record
    list(shard)
    assert padding_record == {}
    list(first)
    assert padding_record == shard.padding_record == {1: (1, 0)}


def test_more_processes_than_samples() -> None:
    shards = [BatchSamplerShard(in_order(2, 3), 3, rank) for rank in range(3)]
    assert [list(shard) for shard in shards] == [[[0, 1, 0]], [[1, 0, 1]], [[0, 1, 0]]]
    assert all(shard.padding_record == {0: (2, 0, 0)} for shard in shards)


def test_one_process_neutralises_the_shard() -> None:
    shard = BatchSamplerShard(in_order(10, 4), 2, 1, split_batches=True)
    shard.num_processes, shard.process_index = 1, 0
    assert list(shard) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(shard) == 3
    assert shard.padding_record == {}


def test_batches_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_size=5: .* 2 equal parts\. .* multiple of 2"):
        BatchSamplerShard(in_order(10, 5), 2, 0, split_batches=True)
    for processes in (1, 2):
        with pytest.raises(ConfigurationError, match=r"batch_size=None: .* equal parts"):
            BatchSamplerShard([[0, 1], [2, 3]], processes, 0, split_batches=True)
    assert list(BatchSamplerShard([[0, 1], [2, 3]], 2, 0)) == [[0, 1]]


def test_batches_of_varying_sizes_are_unchanged() -> None:
    batches = [[0], [1, 2, 3], [4, 5]]
    shards = [BatchSamplerShard(batches, 2, rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[[0], [4, 5]], [[1, 2, 3], [0]]]
    assert shards[0].padding_record == {0: (1, 3), 1: (2, 0)}
    assert shards[0].batch_size is None


class Grouped(BatchSampler):
    """Declares a batch size that its batches don't keep to."""

    def __init__(self) -> None:
        self.batch_size, self.drop_last = 4, False

    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3, 4, 5], [6], [7, 8, 9]])

    def __len__(self) -> int:
        return 4


def test_the_real_batch_size_overrides_a_declared_one() -> None:
    shards = [BatchSamplerShard(Grouped(), 2, rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[[0, 1], [6]], [[2, 3, 4, 5], [7, 8, 9]]]
    assert shards[0].padding_record == {0: (2, 4), 1: (1, 3)}


def test_skip_passes_over_batches() -> None:
    skipping = SkipBatchSampler(BatchSamplerShard(in_order(20, 2), 2, 0), 3)
    assert list(skipping) == [[12, 13], [16, 17]]
    assert (len(skipping), skipping.total_length, skipping.batch_size) == (2, 5, 2)
    assert len(SkipBatchSampler(in_order(4, 2), 9)) == 0
    again = pickle.loads(pickle.dumps(skipping))
    assert list(again) == list(skipping)


def test_single_items_are_assigned_like_batches() -> None:
    shards = [SamplerShard(SequentialSampler(range(5)), 2, rank, even_batches=True) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[0, 2, 4], [1, 3, 0]]
    assert [len(shard) for shard in shards] == [3, 3]
    assert shards[1].padding_record == {2: (1, 0)}
