"""Loaders with `dispatch_batches=True` on one process are dispatchers, and read like any other loader."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
from tests.stand_ins.streams import SizedStream, Stream
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from accelerate.state import AcceleratorState, GradientState

pytestmark = [
    pytest.mark.usefixtures("states"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it in its constructor
]
SIZE = 11


DATASETS: dict[str, Any] = {"map": list(range(SIZE)), "iterable": Stream(SIZE), "sized": SizedStream(SIZE)}


def prepare(dispatch: bool | None, data: str = "map", workers: int = 0, **settings: Any) -> Any:
    loader: Any = DataLoader(DATASETS[data], batch_size=4, shuffle=data == "map", num_workers=workers)
    options = {"use_seedable_sampler": True, "data_seed": 3, "put_on_device": True, **settings}
    return prepare_data_loader(loader, dispatch_batches=dispatch, **options)


def observe(loader: Any) -> list[Any]:
    """The batches of two passes, with what the loader states about each, and a late start."""
    state, found = GradientState(), []
    for late in (loader, loader, skip_first_batches(loader, 1)):
        for batch in late:
            found.append((batch.tolist(), state.end_of_dataloader, state.remainder, late.valid_counts))
        found.append((late.iteration, loader.iteration, len(late) if hasattr(late.dataset, "__len__") else 0))
    return [*found, loader.total_batch_size, replace(loader.plan, uses_dispatcher=False)]


@pytest.mark.parametrize("data", DATASETS)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", [False, True])
def test_a_dispatcher_on_one_process_reads_like_a_shard(data: str, workers: int, split: bool) -> None:
    shard = prepare(False, data, workers, split_batches=split)
    loader = prepare(True, data, workers, split_batches=split)
    assert type(shard) is DataLoaderShard
    assert type(loader) is type(skip_first_batches(loader, 1)) is DataLoaderDispatcher
    assert isinstance(loader, DataLoader)
    assert loader.split_batches is split
    assert observe(loader) == observe(shard)


@pytest.mark.parametrize("data", DATASETS)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_stateful_dispatcher_on_one_process_resumes(data: str, stop: int) -> None:
    settings: dict[str, Any] = {"use_stateful_dataloader": True}
    whole = prepare(True, data, **settings)
    first, second = ([batch.tolist() for batch in whole] for _ in range(2))
    loader = prepare(True, data, **settings)
    for _, _batch in zip(range(stop), loader, strict=False):
        position = copy.deepcopy(loader.state_dict())
    late = prepare(True, data, **settings)
    late.load_state_dict(position)
    if stop == len(first) and loader.torchdata_resumes:
        assert [batch.tolist() for batch in late] == second  # torchdata begins the next epoch
        return
    assert [batch.tolist() for batch in late] == first[stop:]
    assert [batch.tolist() for batch in late] == second


def test_a_dispatcher_on_one_process_starts_no_thread() -> None:
    before = threading.active_count()
    for _ in prepare(True, "iterable"):
        assert threading.active_count() == before


def test_a_checkpoint_of_either_kind_resumes_the_other(tmp_path: Any) -> None:
    found = []
    for saved, resumed in ((True, False), (False, True)):
        for dispatch, is_resumed in ((saved, False), (resumed, True)):
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            settings = DataLoaderConfiguration(
                dispatch_batches=dispatch, use_seedable_sampler=True, data_seed=1
            )
            accelerator = Accelerator(cpu=True, dataloader_config=settings)
            loader = accelerator.prepare(DataLoader(list(range(SIZE)), batch_size=2, shuffle=True))
            assert type(loader) is (DataLoaderDispatcher if dispatch else DataLoaderShard)
            if is_resumed:
                accelerator.load_state(tmp_path / str(saved))
                found.append([batch.tolist() for batch in skip_first_batches(loader, 2)])
                continue
            rows = []
            for number, batch in enumerate(loader):
                rows.append(accelerator.gather_for_metrics(batch).tolist())
                if number == 1:
                    accelerator.save_state(tmp_path / str(saved))
            found.append(rows[2:])
    assert found[0] == found[1] == found[2] == found[3]
    assert sum(map(len, found[0])) == SIZE - 4
