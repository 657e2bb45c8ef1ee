"""Starting in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.stand_ins.streams import SizedStream
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from accelerate.base import ConfigurationError
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import GradientState

pytestmark = pytest.mark.usefixtures("states")


class Recorder(Dataset[int]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def read(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_indices_are_skipped_without_reading() -> None:
    dataset = Recorder()
    plain = skip_first_batches(DataLoader(dataset, batch_size=4), 1.0)  # type: ignore[arg-type]
    assert type(plain) is DataLoader
    assert read(plain) == [[4, 5, 6, 7], [8, 9]]
    assert len(plain) == 2
    prepared = prepare_data_loader(DataLoader(dataset, batch_size=2), num_processes=2, process_index=1)
    assert read(skip_first_batches(skip_first_batches(prepared, 1), 1)) == [[0, 1]]
    assert dataset.read == [4, 5, 6, 7, 8, 9, 0, 1]
    assert read(prepared) == [[2, 3], [6, 7], [0, 1]]
    for number in (1.5, float("inf")):
        with pytest.raises(TypeError, match="whole number"):
            skip_first_batches(prepared, number)  # type: ignore[arg-type]


def test_both_loaders_count_epochs_together() -> None:
    def make() -> Any:
        loader = DataLoader(list(range(30)), batch_size=3, shuffle=True)
        return prepare_data_loader(loader, use_seedable_sampler=True, data_seed=9)

    uninterrupted = make()
    epochs = [read(uninterrupted) for _ in range(3)]
    loader = make()
    loader.set_epoch(1)
    assert read(skip_first_batches(loader, 4)) == epochs[1][4:]
    assert loader.iteration == 2
    assert read(loader) == epochs[2]


class Shuffled(Sampler[int]):
    """A sampler of the user's own, with another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def shard_of(sampler: Shuffled, processes: int, **settings: Any) -> DataLoaderShard:
    batches = BatchSamplerShard(BatchSampler(sampler, 2, False), processes, 0)
    return DataLoaderShard(list(range(12)), batch_sampler=batches, **settings)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_directly_built_shard_keeps_the_epoch_of_its_sampler(processes: int) -> None:
    sampler = Shuffled()
    loader = shard_of(sampler, processes)
    first, second = read(loader), read(loader)
    assert first != second
    assert sampler.epoch == 1
    assert read(skip_first_batches(loader, 1)) == second[1:]
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    assert read(skip_first_batches(loader, 2)) == first[2:]


def test_a_directly_built_dispatcher_keeps_the_epoch_of_its_sampler() -> None:
    sampler = Shuffled()
    loader = DataLoaderDispatcher(list(range(12)), batch_size=2, sampler=sampler)
    first, second = read(loader), read(loader)
    assert first != second
    assert sampler.epoch == 1
    assert read(skip_first_batches(loader, 1)) == second[1:]
    assert sampler.epoch == 1
    read(loader)
    assert sampler.epoch == 2
    sampler.set_epoch(0)
    assert read(skip_first_batches(skip_first_batches(loader, 1), 1)) == first[2:]
    loader.set_epoch(1)
    assert read(skip_first_batches(loader, 3)) == second[3:]


@pytest.mark.parametrize("assigned", [False, True])
def test_the_epoch_of_a_shard_reaches_its_sampler(assigned: bool) -> None:
    sampler = Shuffled()
    loader = shard_of(sampler, 1, iteration=0 if assigned else 3)
    if assigned:
        loader.iteration = 3
    read(loader)
    assert (sampler.epoch, loader.iteration) == (3, 4)


@pytest.mark.parametrize("prepared", [False, True])
def test_iterable_data_is_read_and_left(prepared: bool) -> None:
    loader: Any = DataLoader(SizedStream(10), batch_size=3)
    if prepared:
        loader = prepare_data_loader(loader)
    skipping = skip_first_batches(loader, 2)
    assert prepared or isinstance(skipping, SkipDataLoader)
    state = GradientState()
    ends = []
    for _ in skipping:
        assert state.active_dataloader is skipping
        ends.append((state.end_of_dataloader, state.remainder))
    assert ends == [(False, 1), (True, 1)]
    assert len(skipping) == 2
    assert read(skipping) == [[6, 7, 8], [9]]
    assert read(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_skipping_more_batches_than_there_are_gives_none() -> None:
    skipping = skip_first_batches(prepare_data_loader(DataLoader([1, 2])), 5)
    assert read(skipping) == []
    assert len(skipping) == 0


@pytest.mark.parametrize("number", [-1, "1"])
def test_a_number_of_batches_that_cannot_be_skipped_is_refused(number: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"num_batches={number!r}"):
        skip_first_batches(DataLoader([1]), number)


def test_a_late_start_of_a_plain_stream_keeps_the_settings_of_its_loader() -> None:
    loader = DataLoader(SizedStream(10), batch_size=4, drop_last=True, collate_fn=tuple)
    late = skip_first_batches(loader, 1)
    assert list(late) == [(4, 5, 6, 7)]
