"""Iterable datasets that shard themselves: each process reads its shard, and all end together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.base import CheckpointError, PreparationError

Run = Callable[..., list[Any]]


class Shards(IterableDataset[Any]):
    """Shards of numbers that are shuffled as one, by a seed; `reads` counts the samples read here."""

    def __init__(self, shards: list[list[int]], seed: int | None = None) -> None:
        self.shards, self.num_shards, self.reads = shards, len(shards), 0
        self.shuffler = None if seed is None else torch.Generator().manual_seed(seed)

    def shard(self, num_shards: int, index: int) -> Shards:
        share = type(self)(self.shards[index::num_shards])
        share.shuffler = self.shuffler
        return share

    def order(self) -> list[int]:
        if self.shuffler is None:
            return list(range(len(self.shards)))
        return torch.randperm(len(self.shards), generator=self.shuffler).tolist()

    def __iter__(self) -> Iterator[int]:
        for place in self.order():
            for sample in self.shards[place]:
                self.reads += 1
                yield sample


class Resuming(Shards):
    """The same, with a state dict of its position."""

    index = 0

    def __iter__(self) -> Iterator[int]:
        samples = list(chain.from_iterable(self.shards))
        while self.index < len(samples):
            self.index += 1
            yield samples[self.index - 1]
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def cut(sizes: list[int]) -> list[list[int]]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


SIZES = ([5, 4, 6], [1, 9, 2, 2], [3, 3, 3, 3, 3, 3], [20, 1, 1])


def read(sizes: list[int], batch_size: int | None, workers: int = 0, **config: Any) -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(DataLoader(Shards(cut(sizes)), batch_size, num_workers=workers))
    gathered, steps, ends = [], 0, []
    dataset = getattr(loader.dataset, "dataset", loader.dataset)  # where this rank shards the samples
    for batch in loader:
        steps += 1
        gathered += accelerator.gather_for_metrics(batch).reshape(-1).tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    return sorted(gathered), steps, ends, loader.plan.mode, dataset.reads


def read_all(processes: int) -> list[Any]:
    return [read(sizes, batch) for sizes in SIZES for batch in (1, 2, 4)]


def read_without_dispatch() -> list[Any]:
    return [read(sizes, batch, dispatch_batches=False) for sizes in SIZES for batch in (1, 2, 4)]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_without_dispatch_shards_are_read_where_their_number_divides(run: Run, processes: int) -> None:
    ranks = run(read_without_dispatch, processes=processes)
    for place, sizes in enumerate(sizes for sizes in SIZES for _ in range(3)):
        gathered, steps, ends, hows, reads = zip(*[rank[place] for rank in ranks], strict=True)
        divides = len(sizes) % processes == 0
        assert gathered == (list(range(sum(sizes))),) * processes
        assert len(set(steps)) == 1
        assert all(end == [False] * (len(end) - 1) + [True] for end in ends)
        assert set(hows) == {"dataset_shards" if divides else "shard"}
        shares = tuple(sum(sizes[rank::processes]) for rank in range(processes))
        assert reads == (shares if divides else (sum(sizes),) * processes)


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_each_sample_is_gathered_once_and_all_ranks_end_together(run: Run, processes: int) -> None:
    ranks = run(read_all, processes, processes=processes)
    cases = [sizes for sizes in SIZES for _ in range(3)]
    for place, sizes in enumerate(cases):
        results = [rank[place] for rank in ranks]
        assert [gathered for gathered, *_ in results] == [list(range(sum(sizes)))] * processes
        assert len({steps for _, steps, *_ in results}) == 1
        assert all(ends == [False] * (len(ends) - 1) + [True] for _, _, ends, *_ in results)
        assert {how for *_, how, _ in results} == {"dataset_shards"}
        assert sum(reads for *_, reads in results) == sum(sizes)  # no rank reads for another


def read_with_workers() -> Any:
    return read([5, 4, 6], 2, workers=1)


def test_shares_are_read_by_workers_too(run: Run) -> None:
    assert [rank[0] for rank in run(read_with_workers)] == [list(range(15))] * 2


def prepare(dataset: Any, **settings: Any) -> tuple[str, list[int]]:
    drop_last, batch = settings.pop("drop_last", False), settings.pop("batch_size", 2)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    loader = accelerator.prepare(DataLoader(dataset, batch, drop_last=drop_last))
    return loader.plan.mode, [sample for batch in loader for sample in batch.reshape(-1).tolist()]


def prepare_kinds() -> list[Any]:
    rank, even = PartialState().process_index, cut([4, 4])
    return [
        prepare(Shards(even, seed=1)),
        prepare(Shards(even, seed=rank)),  # each its own shuffle: process 0 reads for all
        prepare(Shards(even), drop_last=True),
        prepare(Shards(even), even_batches=False),
        prepare(Shards(even), dispatch_batches=True),
        prepare(Shards(cut([8]))),  # fewer shards than processes
        prepare(Shards(even), split_batches=True),
        prepare(Shards(even), dispatch_batches=False, split_batches=True),
        prepare(Shards(even), dispatch_batches=False, drop_last=True),
        prepare(Shards(even, seed=2), dispatch_batches=False),
    ]


def test_shares_are_read_where_they_give_the_same_samples(run: Run) -> None:
    first, second = run(prepare_kinds)
    hows = [
        "dataset_shards",
        "dispatch",
        "dispatch",
        "dataset_shards",
        "dispatch",
        "dispatch",
        "dataset_shards",
        "dataset_shards",
        "shard",
        "dataset_shards",
    ]
    assert [how for how, _ in first] == hows == [how for how, _ in second]
    for (_, mine), (_, others) in zip(first, second, strict=True):
        assert sorted(mine + others) == list(range(8))


def read_an_empty_share() -> str:
    with pytest.raises(PreparationError) as caught:
        prepare(Shards([[0, 1], []]))
    return str(caught.value)


def test_an_empty_share_is_the_same_error_everywhere(run: Run) -> None:
    first, second = run(read_an_empty_share)
    assert first == second
    assert "[1] of 2 are empty" in first


def resume_run(
    kind: str, stateful: bool, dispatch: bool | None, sizes: list[int]
) -> list[tuple[list[Any], list[Any]]]:
    """For each stop: what the interrupted run gives in all, and the one that is not."""
    warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata's own
    dataset = {"skips": Shards, "resumes": Resuming}[kind]

    def build() -> tuple[Accelerator, Any]:
        config = DataLoaderConfiguration(use_stateful_dataloader=stateful, dispatch_batches=dispatch)
        accelerator = Accelerator(dataloader_config=config)
        loader = accelerator.prepare(DataLoader(dataset(cut(sizes)), batch_size=2))
        assert loader.plan.mode == "dataset_shards"
        return accelerator, loader

    def epochs(loader: Any, count: int) -> list[Any]:
        return [batch.tolist() for _ in range(count) for batch in loader]

    found = []
    whole = epochs(build()[1], 2)
    for stop in range(1, len(whole) // 2 + 1):
        accelerator, loader = build()
        before = []
        for batch in loader:
            before.append(batch.tolist())
            if len(before) == stop:
                accelerator.save_state("stopped")
                break
        accelerator, loader = build()
        accelerator.load_state("stopped")
        rest = loader if stateful else accelerator.skip_first_batches(loader, stop)
        found.append((before + epochs(rest, 1) + epochs(loader, 1), whole))
    return found


RESUMED = [
    (kind, stateful, dispatch, sizes)
    for dispatch, sizes in [(None, [5, 4, 6]), (None, [5, 4, 6, 1]), (False, [5, 4, 6, 1]), (False, [9, 1])]
    for kind in ("skips", "resumes")
    for stateful in (False, True)
]
IN_GATE = [
    ("skips", True, None, [5, 4, 6]),
    ("resumes", False, None, [5, 4, 6, 1]),
    ("resumes", True, False, [5, 4, 6, 1]),
    ("skips", False, False, [9, 1]),
]


@pytest.mark.parametrize(
    "cases",
    [IN_GATE, pytest.param([case for case in RESUMED if case not in IN_GATE], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_resumed_shards_match_an_uninterrupted_run(run: Run, cases: list[Any]) -> None:
    for rank in run(call_for_each, resume_run, cases, timeout=300):
        for case, results in zip(cases, rank, strict=True):
            for interrupted, whole in results:
                assert interrupted == whole, case


def stop_in_the_middle(folder: str) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Shards(cut([5, 4, 6])), batch_size=2))
    next(iter(loader))
    for _ in loader:
        accelerator.save_state(folder)
        break


def resume_with_another_world_size(folder: str) -> str:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Shards(cut([5, 4, 6])), batch_size=2))
    accelerator.load_state(folder)
    with pytest.raises(CheckpointError) as caught:
        accelerator.skip_first_batches(loader, 1)
    return str(caught.value)


def test_other_shares_than_those_of_the_checkpoint_are_refused(run: Run, tmp_path: Any) -> None:
    folder = str(tmp_path / "stopped")
    run(stop_in_the_middle, folder, processes=2)
    for processes in (1, 3):
        for message in run(resume_with_another_world_size, folder, processes=processes):
            assert "2 data-parallel groups" in message
            assert f"{processes} groups" in message


def read_streams_of_datasets(shards: int, dispatch: bool | None) -> Any:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    state = PartialState()
    stream = Dataset.from_dict({"x": list(range(23))}).to_iterable_dataset(num_shards=shards)
    mine = split_dataset_by_node(stream, rank=state.process_index, world_size=state.num_processes)
    kinds = {
        "plain": stream,
        "seeded": stream.shuffle(seed=3, buffer_size=4),
        "unseeded": stream.shuffle(buffer_size=4),
        "mapped": stream.map(lambda row: {"x": row["x"]}),
        "split": mine,
    }
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    found = {}
    for name, dataset in kinds.items():
        loader = accelerator.prepare(DataLoader(dataset.with_format("torch"), batch_size=4))
        seen = [x for batch in loader for x in accelerator.gather_for_metrics(batch["x"]).tolist()]
        found[name] = (loader.plan.mode, sorted(seen))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4, 5])
def test_streams_of_the_library_datasets(run: Run, shards: int) -> None:
    pytest.importorskip("datasets")
    for found in run(read_streams_of_datasets, shards, None, timeout=120):
        hows = {name: how for name, (how, _) in found.items()}
        assert hows == {**dict.fromkeys(found, "dataset_shards"), "unseeded": "dispatch"}
        assert all(seen == list(range(23)) for _, seen in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4, 5])
def test_streams_of_the_library_datasets_without_dispatch(run: Run, shards: int) -> None:
    pytest.importorskip("datasets")
    for found in run(read_streams_of_datasets, shards, False, timeout=120):
        hows = {name: how for name, (how, _) in found.items()}
        assert hows.pop("split") == "dataset_shards"
        assert hows.pop("unseeded") == "shard"
        assert set(hows.values()) == {"dataset_shards" if shards == 4 else "shard"}
        del found["unseeded"]  # each rank has another order, against what the user has stated
        assert all(seen == list(range(23)) for _, seen in found.values())
