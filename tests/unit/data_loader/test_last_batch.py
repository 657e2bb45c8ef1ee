"""Every sample of the dataset is real once, for any loader and any number of processes; none are started."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.stand_ins.streams import SizedStream, Stream
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate.data_loader import (
    DataLoaderDispatcher,
    IterableDatasetShard,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.ops import Transport
from accelerate.state import PartialState, services

CPU = torch.device("cpu")
Step = tuple[list[int], tuple[int, ...] | None, bool]


class StoringTransport(Transport):
    """A transport that stores what rank 0 sends, for the other ranks to receive one after the other."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.messages: list[Any] = []
        self.unread: deque[Any] = deque()

    def become(self, rank: int) -> None:
        self.rank, self.unread = rank, deque(self.messages)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if self.rank:
            return tensor.copy_(self.unread.popleft())
        self.messages.append(tensor.clone())
        return tensor

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        if parts is None:
            return out.copy_(self.unread.popleft()[self.rank])
        self.messages.append([part.clone() for part in parts])
        return out


class Growing:
    """Batches of 1, 2, 3, ... samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.samples:
            yield list(range(start, min(start + size, self.samples)))
            start, size = start + size, size + 1

    def __len__(self) -> int:
        return len(list(iter(self)))


def make_loader(kind: str, samples: int, batch: int, **more: Any) -> DataLoader[Any]:
    data: Any = torch.arange(samples)
    if kind == "growing":
        return DataLoader(data, batch_sampler=Growing(samples), **more)  # type: ignore[arg-type]
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch, False), **more)
    if kind == "ready batches":
        return DataLoader(list(data.split(batch)), batch_size=None, **more)
    if kind == "stream":
        return DataLoader(Stream(samples), batch_size=batch, **more)
    if kind == "sized stream":
        return DataLoader(SizedStream(samples), batch_size=batch, **more)
    if kind == "shuffled":
        generator = torch.Generator().manual_seed(samples)
        return DataLoader(data, batch_size=batch, shuffle=True, generator=generator, **more)
    return DataLoader(data, batch_size=batch, **more)


KINDS = ("plain", "shuffled", "batch sampler", "growing", "ready batches", "stream", "sized stream")


def read_pass(loader: Any) -> list[Step]:
    return [(batch.tolist(), loader.valid_counts, loader.end_of_dataloader) for batch in loader]


def read_everywhere(
    kind: str, samples: int, batch: int, world: int, workers: int = 0, skip: int = 0, **config: Any
) -> list[list[Step]]:
    """What each of `world` processes reads in its second pass, without any of them."""
    PartialState(cpu=True)
    post = StoringTransport(world)
    services.put(Transport, post)
    ranks = []
    for rank in range(world):
        post.become(rank)
        loader: Any = prepare_data_loader(
            make_loader(kind, samples, batch, num_workers=workers),
            CPU,
            num_processes=world,
            process_index=rank,
            put_on_device=True,
            **config,
        )
        if isinstance(loader, DataLoaderDispatcher) and world > 1 and rank == 0:
            list(loader)
            post.messages.clear()
        elif rank == 0 or not isinstance(loader, DataLoaderDispatcher):
            list(loader)
        ranks.append(read_pass(skip_first_batches(loader, skip) if skip else loader))
    return ranks


def gather(ranks: list[list[Step]], *, by_item: bool = False) -> list[int]:
    """What gather_for_metrics would give for the whole loader.

    Args:
        ranks: What each process read.
        by_item: Whether a process has its own batch only, and receives the metadata of the others.
    """
    gathered = []
    for step in zip_longest(*ranks):
        counts = next(one[1] for one in step if one is not None)
        for rank, one in enumerate(step):
            if one is None:
                assert counts is not None
                assert counts[rank] == 0
                continue
            batch, its_counts, _ = one
            if not by_item:
                assert its_counts == counts
                assert counts is not None or len(batch) == len(step[0][0])
            gathered += batch if its_counts is None else batch[: its_counts[rank]]
    return gathered


@pytest.mark.usefixtures("states")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    samples=st.integers(1, 40),
    batch=st.integers(1, 7),
    world=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
    dispatch=st.booleans(),
)
def test_each_sample_is_read_once(
    kind: str, samples: int, batch: int, world: int, split: bool, even: bool, dispatch: bool
) -> None:
    split = split and kind not in ("growing", "ready batches")
    ranks = read_everywhere(
        kind,
        samples,
        batch * world if split else batch,
        world,
        split_batches=split,
        even_batches=even,
        dispatch_batches=dispatch,
    )
    gathered = gather(ranks, by_item=kind == "ready batches" and not dispatch)
    assert (sorted(gathered) if kind == "shuffled" else gathered) == list(range(samples))
    for steps in filter(None, ranks):
        assert [is_last for *_, is_last in steps] == [False] * (len(steps) - 1) + [True]
    if even or dispatch or "stream" in kind:
        assert len({len(steps) for steps in ranks}) == 1


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_each_sample_is_read_once_with_workers(kind: str, dispatch: bool, world: int) -> None:
    # Each worker of an iterable dataset reads all of it, unless it looks who it is: one is enough here.
    workers = 1 if kind == "stream" else 2
    assert gather(read_everywhere(kind, 17, 3, world, workers, dispatch_batches=dispatch)) == list(range(17))


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("samples", [1, 6, 11, 12, 13])
def test_an_already_sharded_dataset_is_not_sharded_again(
    samples: int, even: bool, dispatch: bool | None
) -> None:
    PartialState(cpu=True)
    ranks = []
    for rank in range(3):
        shard = IterableDatasetShard(Stream(samples), 2, False, 3, rank, even_batches=even)
        loader = prepare_data_loader(
            DataLoader(shard, batch_size=2),
            CPU,
            num_processes=3,
            process_index=rank,
            put_on_device=True,
            dispatch_batches=dispatch,
        )
        ranks.append(read_pass(loader))
        assert "the dataset is sharded already" in repr(loader)
        assert not shard.attaches_counts
    assert gather(ranks) == list(range(samples))


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["plain", "batch sampler", "stream"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_only_skipped_batches_are_missing(kind: str, dispatch: bool, world: int) -> None:
    ranks = read_everywhere(kind, 29, 3, world, skip=2, dispatch_batches=dispatch)
    assert gather(ranks) == list(range(2 * 3 * world, 29))
