"""Loaders that are torchdata's `StatefulDataLoader` too."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import pytest
from tests.stand_ins.streams import Stream
from torch.utils.data import DataLoader
from torchdata import stateful_dataloader as stateful

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader, prepare_data_loader

pytestmark = [
    pytest.mark.usefixtures("states"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it in its constructor
]


def make(iterable: bool, world: int, rank: int) -> Any:
    data: Any = Stream(11) if iterable else list(range(11))
    config: dict[str, Any] = {"use_stateful_dataloader": True, "num_processes": world, "process_index": rank}
    return prepare_data_loader(DataLoader(data, batch_size=2), **config)


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("stop", [1, 2])
def test_a_stateful_loader_resumes_after_the_last_yielded_batch(
    iterable: bool, world: int, rank: int, stop: int
) -> None:
    whole = [batch.tolist() for batch in make(iterable, world, rank)]
    loader = make(iterable, world, rank)
    assert loader.state_dict()
    assert isinstance(loader, DataLoaderShard)
    assert isinstance(loader, stateful.StatefulDataLoader)
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    position = copy.deepcopy(loader.state_dict())
    late = make(iterable, world, rank)
    late.load_state_dict(position)
    assert [batch.tolist() for batch in late] == whole[stop:]
    assert [batch.tolist() for batch in late] == whole


def test_a_state_after_the_last_batch_resumes_with_the_next_epoch() -> None:
    loader = make(False, 1, 0)
    for _ in loader:
        position = loader.state_dict()
    late = make(False, 1, 0)
    late.load_state_dict(position)
    assert list(late) == []
    assert len(list(late)) == len(loader)
    assert isinstance(copy.deepcopy(loader), stateful.StatefulDataLoader)


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_workers_end_with_a_pass_that_is_left_early(kind: Any) -> None:
    loader = kind(Stream(11), batch_size=2, num_workers=1, use_stateful_dataloader=True)
    iterator = iter(loader)
    assert len(next(iterator)) == 2
    iterator.close()
    assert multiprocessing.active_children() == []
    assert sum(map(len, loader)) == 11


def skipping(iterable: bool, workers: int) -> Any:
    data: Any = Stream(11) if iterable else list(range(11))
    settings: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "use_stateful_dataloader": True}
    return SkipDataLoader(data, skip_batches=2, **settings)


@pytest.mark.filterwarnings("ignore:Neither dataset nor iter")
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_skipping_loader_is_read_and_resumed_by_torchdata(iterable: bool, workers: int, stop: int) -> None:
    whole = [[4, 5], [6, 7], [8, 9], [10]]
    loader = skipping(iterable, workers)
    assert type(loader.base_dataloader) is stateful.StatefulDataLoader
    assert isinstance(loader, stateful.StatefulDataLoader)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(stop)] == whole[:stop]
    position = copy.deepcopy(loader.state_dict())
    iterator.close()
    late = skipping(iterable, workers)
    late.load_state_dict(position)
    assert [batch.tolist() for batch in late] == whole[stop:]
    assert [batch.tolist() for batch in late] == whole
    assert [batch.tolist() for batch in loader] == whole
