"""Streams with random numbers or a state of their own: the next batch after a checkpoint is the same."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fuzz import sources
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader, resume, skip_first_batches
from accelerate.utils import set_seed

pytestmark = [
    pytest.mark.usefixtures("states"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:Neither dataset nor iter"),
]
SAMPLES, BATCH = 13, 2
STATEFUL = {"use_stateful_dataloader": True}


def train(kind: str, config: dict[str, Any], folder: Path, stop: int = -1, start: int = 0) -> list[Any]:
    """The samples of an epoch, between which training draws random numbers, too."""
    set_seed(99 if start else 0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    loader: Any = accelerator.prepare(DataLoader(sources.STREAMS[kind](SAMPLES, "torch"), BATCH))
    if start:
        accelerator.load_state(folder)
    by_itself = config.get("use_stateful_dataloader") or not start
    batches = []
    for number, (_, inputs) in enumerate(
        loader if by_itself else accelerator.skip_first_batches(loader, start), start
    ):
        batches.append((inputs.tolist(), torch.rand(()).item()))
        if number == stop:
            accelerator.save_state(folder)
            break
    return batches


@pytest.mark.parametrize("kind", ["stream", "position"])
@pytest.mark.parametrize("config", [{}, STATEFUL, {"dispatch_batches": True}], ids=str)
def test_a_stream_that_draws_random_numbers_resumes_exactly(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    whole = train(kind, config, tmp_path)
    before = train(kind, config, tmp_path, stop=2)
    assert before + train(kind, config, tmp_path, start=3) == whole


@pytest.mark.parametrize("kind", ["stream", "position"])
@pytest.mark.parametrize("config", [{}, STATEFUL], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_resumed_twice_in_an_epoch(
    tmp_path: Path, kind: str, config: dict[str, Any], workers: int
) -> None:
    def read(start: int, stop: int = 99) -> list[Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        data = sources.STREAMS[kind](4 * SAMPLES, "")
        loader: Any = accelerator.prepare(DataLoader(data, BATCH, num_workers=workers))
        if start:
            accelerator.load_state(tmp_path)
        skips = start and not config
        batches = []
        rest = accelerator.skip_first_batches(loader, start) if skips else loader
        for number, (index, _) in enumerate(rest, start):
            batches.append(index.tolist())
            if number + 1 == stop:
                accelerator.save_state(tmp_path)
                break
        return batches

    whole = read(0)
    assert read(0, 3) + read(3, 7) + read(7) == whole


def test_the_states_before_a_batch_are_saved_only_where_reading_draws() -> None:
    for augment, is_saved in (("torch", True), ("", False)):
        loader = make("stream", 1, augment=augment)
        batches = iter(loader)
        next(batches)
        assert ("read" in resume.capture_stream(loader)) == is_saved


def make(kind: str, world: int, rank: int = 0, workers: int = 0, augment: str = "", **settings: Any) -> Any:
    source = DataLoader(sources.STREAMS[kind](SAMPLES, augment), BATCH, num_workers=workers)
    return prepare_data_loader(
        source, num_processes=world, process_index=rank, dispatch_batches=False, **settings
    )


def indices(batches: Any) -> list[list[int]]:
    return [batch[0].flatten().tolist() for batch in batches]


def test_a_shard_of_an_endless_stream_resumes_at_the_position_of_the_stream() -> None:
    loader = make("endless", 2, 1, **STATEFUL)
    list(islice(loader, 2))
    expected = indices(islice(loader, 5))
    loader = make("endless", 2, 1, **STATEFUL)
    list(islice(loader, 2))
    batches = iter(loader)
    assert indices(islice(batches, 3)) == expected[:3]
    later = make("endless", 2, 1, **STATEFUL)
    later.load_state_dict(loader.state_dict())
    assert indices(islice(later, 2)) == expected[3:]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_end_of_a_resumed_shard_is_filled_from_the_beginning_of_the_epoch(workers: int) -> None:
    expected = indices(make("position", 2, 1, workers, **STATEFUL))
    loader = make("position", 2, 1, workers, **STATEFUL)
    batches = iter(loader)
    next(batches)
    later = make("position", 2, 1, workers, **STATEFUL)
    later.load_state_dict(loader.state_dict())
    assert indices(later) == expected[1:]
    batches.close()


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_another_world_size_resumes_at_the_state_of_the_stream_that_torchdata_saved(
    before: int, now: int
) -> None:
    loader = make("counting", before, **STATEFUL)
    indices(loader)
    batches = iter(loader)
    next(batches)
    state, streams = resume.capture(loader), resume.capture_stream(loader)
    assert state is not None
    order = sources.CountingStream(SAMPLES)
    order.epoch = 1
    rest = []
    for rank in range(now):
        later = make("counting", now, rank, **STATEFUL)
        resume.restore(later, state, streams)
        rest += [index for batch in indices(later) for index in batch]
    assert set(rest) >= set(order.order()[before * BATCH :])
    assert len(rest) <= SAMPLES - before * BATCH + now * BATCH


@pytest.mark.parametrize("kind", ["stream", "position"])
def test_a_batch_of_the_old_pass_behind_a_load_does_not_change_the_next_pass(kind: str) -> None:
    loader = make(kind, 1, **STATEFUL)
    expected = indices(make(kind, 1, **STATEFUL))
    batches = iter(loader)
    list(islice(batches, 2))
    state, streams = resume.capture(loader), resume.capture_stream(loader)
    assert state is not None
    resume.restore(loader, state, streams)
    next(batches)
    batches.close()
    assert indices(loader) == expected[2:]


def test_a_state_read_before_the_first_pass_is_dropped_when_a_checkpoint_is_loaded() -> None:
    loader = make("stream", 1, **STATEFUL)
    saved = resume.capture(loader)
    assert saved is not None
    assert loader.state_dict()
    resume.restore(loader, saved)
    assert len(indices(loader)) == len(loader.dataset.order()) // BATCH + 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_another_world_size_shuffles_as_one_process_with_persistent_workers_did(epoch: int) -> None:
    def shuffled(world: int, rank: int) -> Any:
        data = sources.Samples(SAMPLES, "")
        source = DataLoader(data, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
        return prepare_data_loader(source, num_processes=world, process_index=rank)

    loader = shuffled(1, 0)
    for _ in range(epoch):
        indices(loader)
    batches = iter(loader)
    before = indices(islice(batches, 2))
    state = resume.capture(loader)
    assert state is not None
    expected = sum(indices(batches), sum(before, []))[2 * BATCH :]
    rest: list[int] = []
    for rank in range(2):
        later = shuffled(2, rank)
        resume.restore(later, state)
        late = skip_first_batches(later, 2)
        rest += sum(indices(late), [])
        late.base_dataloader._iterator = later.base_dataloader._iterator = None
    loader.base_dataloader._iterator = None
    assert set(rest) == set(expected)
