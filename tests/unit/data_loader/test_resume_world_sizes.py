"""An epoch that runs of several world sizes read together, one after another, has each sample once."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.base import CheckpointError
from accelerate.data_loader import prepare_data_loader, resume, skip_first_batches

pytestmark = pytest.mark.usefixtures("states")
SAMPLES = 61
CHAINS = [
    [(3, 3), (2, None)],
    [(3, 3), (2, 2), (2, None)],
    [(3, 2), (2, 2), (2, 1), (2, None)],
    [(3, 3), (2, 2), (1, 4), (1, 3), (3, None)],
]


class Stream(IterableDataset[int]):
    """Worker `i` reads `sizes[i]` samples, and each worker the same number without `sizes`."""

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(SAMPLES))
        if not self.sizes:
            return iter(range(info.id, SAMPLES, info.num_workers))
        begin = sum(self.sizes[: info.id])
        return iter(range(begin, begin + self.sizes[info.id]))


def prepare(data: Any, groups: int, batch: int, split: bool, workers: int = 0) -> list[Any]:
    """The loaders of all ranks."""
    return [
        prepare_data_loader(
            DataLoader(data, batch, num_workers=workers),
            torch.device("cpu"),
            groups,
            rank,
            split_batches=split,
            dispatch_batches=False,
        )
        for rank in range(groups)
    ]


def read(loader: Any, batches: int | None) -> tuple[list[int], Any]:
    """Read some batches, or all; return their samples, without padding, and the state behind them."""
    samples: list[int] = []
    for number, batch in enumerate(loader, 1):
        rank, counts = loader.plan.group, loader.valid_counts
        samples += batch.tolist()[: None if counts is None else counts[rank]]
        if number == batches:
            return samples, resume.capture(loader if loader.start.origin is None else loader.start.origin)
    return samples, None


def read_chain(data: Any, chain: list[tuple[int, int | None]], **options: Any) -> list[int]:
    """Read one epoch in runs of some groups that read some batches each, and resume with the next one."""
    samples: list[int] = []
    state: Any = None
    seen = 0
    for groups, batches in chain:
        for rank, loader in enumerate(prepare(data, groups, **options)):
            if state is not None:
                resume.restore(loader, state)
            found, captured = read(skip_first_batches(loader, seen) if seen else loader, batches)
            samples += found
            last = captured if rank == groups - 1 else None
        state, seen = last, seen + (batches or 0)
    return samples


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize(("batch", "split"), [(2, False), (6, True)])
@pytest.mark.parametrize("data", [list(range(SAMPLES)), Stream()], ids=["map", "stream"])
def test_each_sample_is_read_once(data: Any, batch: int, split: bool, chain: Any) -> None:
    assert sorted(read_chain(data, chain, batch=batch, split=split)) == list(range(SAMPLES))


@pytest.mark.parametrize("chain", [CHAINS[1], [(2, 3), (1, None)], [(2, 1), (1, 1), (3, None)]], ids=str)
def test_each_worker_skips_what_it_has_read(chain: Any) -> None:
    found = read_chain(Stream(), chain, batch=2, split=False, workers=2)
    assert sorted(found) == list(range(SAMPLES))


def test_workers_of_other_lengths_resume_until_one_of_them_ends() -> None:
    data = Stream((7, 54))
    found = read_chain(data, [(3, 3), (2, None)], batch=2, split=False, workers=2)
    assert Counter(found) == Counter(range(SAMPLES))
    with pytest.raises(CheckpointError, match="samples of worker 0 of 2 had ended"):
        read_chain(data, [(3, 5), (2, None)], batch=2, split=False, workers=2)
    gc.collect()  # the traceback has held the iterator of the workers


def test_another_number_of_workers_is_refused_for_a_stream() -> None:
    (loader,), (other,) = (prepare(Stream(), 1, 2, False, workers) for workers in (0, 2))
    state = read(loader, 2)[1]
    resume.restore(other, state)
    with pytest.raises(CheckpointError, match="num_workers was 0, is 2 now"):
        skip_first_batches(other, 2)
    (one,) = prepare(Stream(), 1, 2, False, 1)
    resume.restore(one, state)
    assert read(skip_first_batches(one, 2), 1)[0] == [4, 5]
