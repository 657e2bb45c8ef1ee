"""A loader that starts in the middle of an epoch: at once, and without reading what it passes over."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from tests.stand_ins.streams import Stream
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate.base import CheckpointError
from accelerate.data_loader import (
    Position,
    Restored,
    ShardPlan,
    make_resumed_loader,
    prepare_data_loader,
    resume,
    skip_first_batches,
    skip_prepared,
)

pytestmark = pytest.mark.usefixtures("states")
MILLION, BATCH = 1_000_000, 2


class Counted(Dataset[Any]):
    """A huge dataset that records the indices read."""

    def __init__(self, samples: int = BATCH * MILLION + 50) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def make(data: Any, processes: int = 1, rank: int = 0, **config: Any) -> Any:
    loader = DataLoader(data, batch_size=BATCH, shuffle=not isinstance(data, IterableDataset))
    return prepare_data_loader(loader, torch.device("cpu"), processes, rank, **config)


def python_calls(work: Any) -> int:
    """How many functions and generators of Python run in a piece of work: it doesn't depend on the clock."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize(
    "config",
    [{}, {"use_seedable_sampler": True}, {"use_constant_memory_sampler": True}],
    ids=["default", "seedable", "constant memory"],
)
def test_a_million_batches_are_skipped_without_reading(
    processes: int, rank: int, config: dict[str, Any]
) -> None:
    data = Counted(processes * (BATCH * MILLION // processes) + 50)
    late = skip_first_batches(make(data, processes, rank, **config), MILLION // processes)
    found: list[Any] = []
    calls = python_calls(lambda: found.append(next(iter(late))))
    assert len(data.read) == BATCH
    assert found[0].tolist() == data.read
    assert calls < 20_000


def test_a_resumed_loader_reads_no_earlier_sample() -> None:
    data = Counted()
    loader = make(data)
    state = {**(resume.capture(loader) or {}), "seen": MILLION, "consumed": MILLION}
    resume.restore(loader, state)
    late, found = skip_first_batches(loader, MILLION), []
    assert python_calls(lambda: found.append(next(iter(late)))) < 20_000
    assert len(data.read) == BATCH


def resumed(
    loader: Any,
    seen: int,
    groups: int = 1,
    consumed: int | None = None,
    rows: int | None = None,
    mode: Any = "shard",
    is_over: bool = False,
) -> Any:
    position = Position(seen=seen, consumed=seen if consumed is None else consumed, is_over=is_over)
    loader.tracker.restored = Restored(position, ShardPlan(mode, groups, batch_size=rows), {}, {})
    return loader


def test_batches_already_given_are_skipped() -> None:
    late = skip_prepared(make(Stream(20)), 3)
    assert [batch.tolist() for batch in late][0] == [6, 7]


def test_another_number_of_groups_resumes_after_the_samples_of_all_groups() -> None:
    data = Counted(20)
    parts = []
    for rank in range(2):
        loader = prepare_data_loader(DataLoader(data, batch_size=BATCH), torch.device("cpu"), 2, rank)
        late = skip_prepared(resumed(loader, 2, groups=3, consumed=6), 2)
        parts += [value for batch in late for value in batch.tolist()]
    assert sorted(parts) == list(range(12, 20))


def test_another_number_of_groups_reads_the_rest_of_a_stream() -> None:
    parts = []
    for rank in range(2):
        loader = make(Stream(20), 2, rank, dispatch_batches=False)
        late = skip_prepared(resumed(loader, 1, groups=3, consumed=3), 1)
        parts += [value for batch in late for value in batch.tolist()]
    assert sorted(set(parts)) == list(range(6, 20))


@pytest.mark.parametrize(("groups", "seen", "rows", "first"), [(2, 4, 1, 8), (1, 2, 4, 8), (2, 3, 2, 12)])
def test_batches_of_another_size_resume_after_the_same_samples(
    groups: int, seen: int, rows: int, first: int
) -> None:
    """`seen` global batches of `groups` batches of `rows` samples were read; batches have 2 now."""
    loader = prepare_data_loader(DataLoader(Counted(20), batch_size=BATCH), torch.device("cpu"), 1, 0)
    late = skip_prepared(resumed(loader, seen, groups, seen * groups, rows), seen)
    assert [value for batch in late for value in batch.tolist()] == list(range(first, 20))
    assert len(late) == (20 - first) // BATCH


def test_batches_that_do_not_begin_there_are_refused() -> None:
    loader = resumed(make(Counted(20)), 3, rows=3)
    with pytest.raises(CheckpointError, match=r"9 of its samples were read in batches of 3.*no batch of 2"):
        skip_prepared(loader, 3)


def test_shards_of_a_dataset_do_not_resume_with_another_batch_size() -> None:
    loader = resumed(make(Counted(20)), 2, rows=4, mode="already_sharded")
    loader.plan = replace(loader.plan, mode="dataset_shards")
    with pytest.raises(CheckpointError, match="batches of 4 and not of 2, and the batches of shards"):
        skip_prepared(loader, 2)


def test_batches_of_another_size_resume_from_a_checkpoint() -> None:
    """Two processes with batches of 2, then one with batches of 4: half of the samples are left."""
    before = prepare_data_loader(DataLoader(Counted(16), batch_size=2), torch.device("cpu"), 2, 0)
    batches = iter(before)
    next(batches), next(batches)
    state: dict[str, Any] = resume.capture(before) or {}
    after = prepare_data_loader(DataLoader(Counted(16), batch_size=4), torch.device("cpu"), 1, 0)
    resume.restore(after, state)
    assert [batch.tolist() for batch in skip_first_batches(after, 2)] == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_finished_epoch_has_no_more_batches() -> None:
    assert list(skip_prepared(resumed(make(Stream(20)), 10, is_over=True), 10)) == []


@pytest.mark.parametrize(
    ("seen", "stateful", "resumes"), [(3, True, True), (0, True, False), (3, False, False)]
)
def test_only_a_stateful_loader_resumes_by_itself(seen: int, stateful: bool, resumes: bool) -> None:
    loader = resumed(make(Counted(20)), seen)
    loader.use_stateful_dataloader = stateful
    assert (make_resumed_loader(loader) is not None) == resumes
    assert make_resumed_loader(make(Counted(20))) is None


def test_a_late_start_shares_what_is_not_changed() -> None:
    loader = make(Stream(20))
    late: Any = skip_prepared(loader, 4)
    assert (late.skip_batches, loader.skip_batches) == (4, 0)
    assert late.dataset is loader.dataset
    assert late.tracker is loader.tracker
