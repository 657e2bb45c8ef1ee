"""Preparing a loader, in one process that simulates every rank."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accelerate.base import PreparationError, StateError
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    base,
    get_sampler,
    prepare_data_loader,
)
from accelerate.state import GradientState

pytestmark = pytest.mark.usefixtures("states")
Pair = namedtuple("Pair", ["x", "y"])


def own_collate(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 10


def own_init(worker: int) -> None:
    torch.manual_seed(worker)


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size, self.epochs = size, []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Sized(Stream):
    def __len__(self) -> int:
        return self.size


def prepare(loader: DataLoader[Any], world: int = 1, rank: int = 0, **config: Any) -> Any:
    return prepare_data_loader(loader, num_processes=world, process_index=rank, put_on_device=True, **config)


def read(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_settings_of_the_user_are_kept() -> None:
    generator = torch.Generator()
    loader = DataLoader(
        list(range(8)),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=5,
        collate_fn=own_collate,
        worker_init_fn=own_init,
        timeout=30,
        multiprocessing_context="spawn",
        generator=generator,
        pin_memory=True,
        in_order=False,
    )
    prepared = prepare(loader, 2)
    assert isinstance(prepared, DataLoader)
    assert isinstance(prepared, DataLoaderShard)
    for name in ("num_workers", "persistent_workers", "prefetch_factor", "timeout", "pin_memory", "in_order"):
        assert getattr(prepared, name) == getattr(loader, name)
    for name in ("collate_fn", "worker_init_fn", "multiprocessing_context", "generator", "dataset"):
        assert getattr(prepared, name) is getattr(loader, name)
    assert type(prepared.base_dataloader) is DataLoader
    assert prepared.base_dataloader.dataset is loader.dataset


def test_the_shard_can_be_neutralised() -> None:
    prepared = prepare(DataLoader(list(range(7)), batch_size=2), 2, 1)
    shard = prepared.batch_sampler
    assert isinstance(shard, BatchSamplerShard)
    assert isinstance(shard.batch_sampler, BatchSampler)
    shard.num_processes, shard.process_index = 1, 0
    assert read(prepared) == [[0, 1], [2, 3], [4, 5], [6]]
    assert len(prepared) == 4
    assert prepared.valid_counts is None


def test_one_process_shuffles_as_the_plain_loader() -> None:
    loader = DataLoader(list(range(20)), batch_size=3, shuffle=True)
    torch.manual_seed(0)
    plain = [read(loader) for _ in range(2)]
    torch.manual_seed(0)
    prepared = prepare(loader)
    assert [read(prepared) for _ in range(2)] == plain


class Reversed(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


@pytest.mark.parametrize(
    "make", [Reversed, partial(SeedableRandomSampler, data_seed=7)], ids=["own", "seedable"]
)
def test_a_random_sampler_with_an_order_of_its_own_is_kept(make: Callable[[range], RandomSampler]) -> None:
    loader = prepare(DataLoader(list(range(20)), sampler=make(range(20))), use_seedable_sampler=True)
    assert [batch.item() for batch in loader] == list(make(range(20)))


def test_a_pass_that_is_left_early_is_an_epoch_too() -> None:
    loader = prepare(DataLoader(list(range(50)), shuffle=True), use_seedable_sampler=True, data_seed=1)
    heads = [next(iter(loader)).item() for _ in range(8)]
    assert loader.iteration == 8
    assert len(set(heads)) > 3


def test_an_epoch_set_on_the_sampler_takes_precedence() -> None:
    sampler = torch.utils.data.DistributedSampler(range(10), num_replicas=1, rank=0, seed=3)
    plain = DataLoader(list(range(10)), batch_size=5, sampler=sampler)
    sampler.set_epoch(5)
    expected = read(plain)
    loader = prepare(plain)
    assert read(loader) == expected
    assert loader.iteration == 6
    assert read(loader) != expected
    assert sampler.epoch == 6


def test_the_epoch_reaches_an_iterable_dataset() -> None:
    dataset = Stream(4)
    loader = prepare(DataLoader(dataset), 2, dispatch_batches=False)
    read(loader)
    read(loader)
    loader.set_epoch(7)
    assert dataset.epochs == [0, 1, 7]


def test_length_of_iterable_data() -> None:
    assert len(prepare(DataLoader(Sized(10), batch_size=2), 3, 1, dispatch_batches=False)) == 2
    assert len(prepare(DataLoader(Sized(10), batch_size=2))) == 5
    with pytest.raises(TypeError):
        len(prepare(DataLoader(Stream(10), batch_size=2)))


def test_valid_counts_of_iterable_data_are_sent_from_workers() -> None:
    for rank, expected in enumerate([[[0, 1], [4, 0]], [[2, 3], [1, 2]]]):
        loader = prepare(DataLoader(Stream(5), batch_size=2, num_workers=1), 2, rank, dispatch_batches=False)
        seen = [(batch.tolist(), loader.valid_counts) for batch in loader]
        assert seen == [(expected[0], None), (expected[1], (1, 0))]
        assert loader.collate_fn is torch.utils.data.default_collate
        assert loader.remainder == 1
    del loader
    gc.collect()


def test_the_state_of_the_pass() -> None:
    state = GradientState()
    loader = prepare(DataLoader(list(range(5)), batch_size=2))
    for number, _ in enumerate(loader):
        assert state.active_dataloader is loader
        assert state.end_of_dataloader == (number == 2)
        assert state.remainder == 1
    assert state.active_dataloader is None
    for _ in loader:
        break
    assert state.active_dataloader is None
    with pytest.raises(LookupError):
        for _ in loader:
            raise LookupError
    assert state.active_dataloader is None


def test_the_remainder_depends_on_the_sampler_and_not_the_dataset() -> None:
    sampler = torch.utils.data.SubsetRandomSampler(range(8))
    loader = prepare(DataLoader(list(range(11)), batch_size=4, sampler=sampler), 2)
    read(loader)
    assert loader.remainder == 0
    assert loader.total_batch_size == 8
    assert loader.total_dataset_length == 11


def test_a_whole_batch_per_index() -> None:
    data = [torch.tensor([i, i]) for i in range(3)]
    loader = prepare(DataLoader(data, batch_size=None), 2, 1)
    assert [(batch.tolist(), loader.valid_counts) for batch in loader] == [([1, 1], None), ([0, 0], (2, 0))]
    batched = DataLoader(
        torch.arange(10), sampler=BatchSampler(SequentialSampler(range(10)), 4, False), batch_size=None
    )
    loader = prepare(batched, 2, 1)
    assert [(batch.tolist(), loader.valid_counts) for batch in loader] == [
        ([4, 5, 6, 7], None),
        ([2, 3, 4, 5], (2, 0)),
    ]


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like the batches of tokenizers: a mapping with a method `to`."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


@pytest.mark.parametrize("kind", [dict, Encoding, "pair", "list"])
def test_batches_of_any_type_are_moved_to_the_device(kind: Any) -> None:
    def collate(samples: list[int]) -> Any:
        x = torch.tensor(samples)
        if kind == "pair":
            return Pair(x, [x, "text"])
        return [x, {"deep": x}] if kind == "list" else kind(x=x)

    loader = prepare(
        DataLoader(list(range(4)), batch_size=2, collate_fn=collate), device=torch.device("meta")
    )
    for batch in loader:
        if kind == "pair":
            assert isinstance(batch, Pair)
            assert (batch.x.device.type, batch.y[0].device.type, batch.y[1]) == ("meta", "meta", "text")
        elif kind == "list":
            assert (batch[0].device.type, batch[1]["deep"].device.type) == ("meta", "meta")
        else:
            assert type(batch) is kind
            assert batch["x"].device.type == "meta"


def test_batches_on_the_device_are_the_same_objects() -> None:
    data = [torch.tensor([1.0])]
    loader = prepare(DataLoader(data, batch_size=None), device=torch.device("cpu"))
    assert next(iter(loader)) is data[0]


def test_batches_on_other_devices_are_moved_to_the_cpu() -> None:
    sent = []

    class OnMeta(Encoding):
        def to(self, device: Any) -> OnMeta:
            sent.append(device)
            return self

    data = [OnMeta(x=torch.empty(2, device="meta"))] * 2
    loader = prepare(
        DataLoader(data, batch_size=None, collate_fn=lambda one: one), device=torch.device("cpu")
    )
    assert list(loader) == data
    assert sent == ["cpu", "cpu"]


def test_loaders_can_be_pickled_and_copied() -> None:
    loader = prepare(
        DataLoader(list(range(7)), batch_size=2, shuffle=True), 2, 1, use_seedable_sampler=True, data_seed=2
    )
    expected = read(copy.deepcopy(loader))
    assert read(pickle.loads(pickle.dumps(loader))) == expected
    again = copy.copy(loader)
    assert read(again) == expected
    assert again.plan == loader.plan
    dispatcher = DataLoaderDispatcher(list(range(4)), batch_size=2)
    assert read(pickle.loads(pickle.dumps(dispatcher))) == [[0, 1], [2, 3]]


def test_the_sampler_can_be_replaced() -> None:
    loader = prepare(DataLoader(list(range(6)), batch_size=2), 2, 0)
    assert isinstance(loader.get_sampler(), SequentialSampler)
    loader.set_sampler(SequentialSampler(range(2)))
    assert read(loader) == [[0, 1]]
    assert get_sampler(DataLoader([1], shuffle=True)).__class__ is RandomSampler
    assert get_sampler(DataLoader([1], batch_sampler=[[0]])) is None


def test_preparing_twice_is_refused() -> None:
    with pytest.raises(PreparationError, match="prepared already"):
        prepare(prepare(DataLoader([1, 2])))


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch * 2 for batch in super().__iter__())


def test_a_loader_with_its_own_iteration_is_refused() -> None:
    with pytest.raises(PreparationError, match="Doubling overrides __iter__"):
        prepare(Doubling([1, 2]))  # type: ignore[arg-type]


def test_the_plan_is_shown() -> None:
    assert (
        repr(prepare(DataLoader([1, 2]), 2, 1))
        == "<DataLoaderShard: shard, part 1 of 2 (by the batch sampler)>"
    )


def test_state_dict_of_a_stateless_loader_is_an_error() -> None:
    loader = prepare(DataLoader([1, 2]))
    with pytest.raises(StateError, match="use_stateful_dataloader=True"):
        loader.state_dict()
    with pytest.raises(StateError, match="use_stateful_dataloader=True"):
        loader.load_state_dict({})


def test_stateful_loaders_resume_without_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "is_torchdata_stateful_dataloader_available", lambda: False)
    loader, late = (prepare(DataLoader([1, 2, 3]), use_stateful_dataloader=True) for _ in range(2))
    assert not loader.is_by_torchdata
    batches = iter(loader)
    next(batches)
    late.load_state_dict(loader.state_dict())
    del batches
    assert [batch.item() for batch in late] == [2, 3]
    assert [batch.item() for batch in late] == [1, 2, 3]


def test_the_gradient_state_keeps_no_reference_to_a_loader() -> None:
    loader = prepare(DataLoader([1, 2]))
    state = GradientState()
    iterator = iter(loader)
    next(iterator)
    assert state.active_dataloader is loader
    del loader, iterator
    gc.collect()
    assert state.active_dataloader is None
