"""An epoch that runs of several world sizes read together, one after another, has each sample once."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accelerate import rng
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
    return [prepare_rank(rank, data, groups, batch, split, workers) for rank in range(groups)]


def prepare_rank(rank: int, data: Any, groups: int, batch: int, split: bool, workers: int = 0) -> Any:
    sampler = data if isinstance(data, Sampler) else None
    return prepare_data_loader(
        DataLoader(data if sampler is None else range(SAMPLES), batch, sampler=sampler, num_workers=workers),
        torch.device("cpu"),
        groups,
        rank,
        split_batches=split,
        dispatch_batches=False,
    )


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
    with pytest.raises(CheckpointError, match="num_workers was 0 and is 2 now"):
        skip_first_batches(other, 2)
    (one,) = prepare(Stream(), 1, 2, False, 1)
    resume.restore(one, state)
    assert read(skip_first_batches(one, 2), 1)[0] == [4, 5]


class Own(Sampler[int]):
    """Sampler that draws its order in one way of `ORDERS`."""

    def __init__(self, draw: Callable[[Any], Iterable[int]], **attributes: Any) -> None:
        self.draw = draw
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        yield from self.draw(getattr(self, "generator", None))

    def __len__(self) -> int:
        return SAMPLES


def shuffle_in_python(_: Any) -> list[int]:
    order = list(range(SAMPLES))
    random.shuffle(order)
    return order


def shuffle_twice(generator: Any) -> list[int]:
    torch.rand(3, generator=generator)
    return torch.randperm(SAMPLES, generator=generator).tolist()


def draw_each(_: Any) -> Iterator[int]:
    left = list(range(SAMPLES))
    while left:
        yield left.pop(int(torch.randint(len(left), ())))


CHAINS_OF_ORDERS: list[list[tuple[int, int | None]]] = [
    [(1, 5), (2, None)],
    [(1, 5), (3, 2), (2, 2), (1, None)],
    [(3, 2), (1, 3), (2, None)],
]
ORDERS: dict[str, Callable[[], Sampler[int]]] = {
    "shuffle": lambda: RandomSampler(range(SAMPLES)),
    "part": lambda: SubsetRandomSampler(list(range(SAMPLES))),
    "weighted": lambda: WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], SAMPLES),
    "of a generator": lambda: SubsetRandomSampler(range(SAMPLES), torch.Generator().manual_seed(3)),
    "of numpy": lambda: Own(lambda _: np.random.permutation(SAMPLES).tolist()),
    "of Python": lambda: Own(shuffle_in_python),
    "of torch": lambda: Own(shuffle_twice),
    "of torch, with an attribute": lambda: Own(shuffle_twice, generator=None),
    "seed": lambda: Own(
        lambda _: torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(random.randrange(99))
        ).tolist()
    ),
}


def read_order(
    make: Callable[[], Sampler[int]], chain: list[tuple[int, int | None]], workers: int = 0
) -> list[int]:
    """Read an epoch as `read_chain` does, with equal random states on all ranks at the beginning of a run."""
    samples: list[int] = []
    state: Any = None
    last: Any = None
    seen = 0
    for number, (groups, batches) in enumerate(chain):
        for rank in range(groups):
            rng.set_seed(5 + number)
            loader = prepare_rank(rank, make(), groups, 2, split=False, workers=workers)
            rng.set_seed(50 + number)
            if state is not None:
                resume.restore(loader, state)
            found, captured = read(skip_first_batches(loader, seen) if seen else loader, batches)
            samples += found
            last = captured if rank == 0 else last
        state, seen = last, seen + (batches or 0)
    return samples


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_order_of_any_sampler_resumes(workers: int) -> None:
    wrong = []
    for name, make in ORDERS.items():
        for chain in CHAINS_OF_ORDERS:
            found = read_order(make, chain, workers)
            if sorted(found) != sorted(read_order(make, [(chain[0][0], None)], workers)):
                wrong.append((name, chain))
    assert not wrong


def test_an_order_that_is_drawn_while_it_is_read_is_refused() -> None:
    for chain in ([(1, 5), (2, None)], [(2, 5), (1, None)]):
        with pytest.raises(CheckpointError, match="Own draws its indices one after another"):
            read_order(lambda: Own(draw_each), chain)
    read_order(lambda: Own(draw_each), [(1, 5), (1, None)])
