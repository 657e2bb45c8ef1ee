"""Loaders that are already rank-aware are kept as they are: each sample is read once."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)

from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.base import CheckpointError, ConfigurationError, PreparationError
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from accelerate.utils import set_seed

Run = Callable[..., list[Any]]
SIZES = [(1, 1), (3, 2), (8, 4), (13, 2), (17, 3), (32, 4)]  # samples, batch size


def data(samples: int) -> Any:
    return torch.arange(samples)


def ranks() -> dict[str, int]:
    state = PartialState()
    return {"num_replicas": state.num_processes, "rank": state.process_index}


class Strided(DistributedSampler[Any]):
    """The same order as torch's sampler, by an iteration of its own, and with longer indices first."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.dataset)))[::-1]  # type: ignore[arg-type]
        if not self.drop_last:
            order = (order * math.ceil(self.total_size / len(order)))[: self.total_size]
        return iter(order[self.rank : self.total_size : self.num_replicas])


class Blocks(Sampler[int]):
    """Consecutive blocks of different sizes, with a rank that is a property."""

    def __init__(self, samples: int, num_replicas: int, rank: int) -> None:
        self.samples, self.num_replicas, self._rank = samples, num_replicas, rank
        size = -(-samples // num_replicas)
        self.indices = list(range(rank * size, min((rank + 1) * size, samples)))

    @property
    def rank(self) -> int:
        return self._rank

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Wrapper(Sampler[int]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class GrowingBatches:
    """Every n-th of batches of 1, 2, 3, ... samples; no class of torch, and without a length."""

    def __init__(self, samples: int) -> None:
        self.samples, self.world_size, self.rank = samples, *ranks().values()

    def __iter__(self) -> Iterator[list[int]]:
        starts = itertools.accumulate(itertools.count(1), initial=0)
        spans = itertools.takewhile(lambda span: span[0] < self.samples, itertools.pairwise(starts))
        for start, stop in itertools.islice(spans, self.rank, None, self.world_size):
            yield list(range(start, min(stop, self.samples)))


def make_loader(kind: str, samples: int, size: int, **settings: Any) -> DataLoader[Any]:
    whole = data(samples)
    if kind == "growing":
        return DataLoader(whole, batch_sampler=GrowingBatches(samples), **settings)  # type: ignore[arg-type]
    if kind == "ready batches":
        parts = list(whole.split(size))
        sampler: Any = Blocks(len(parts), **ranks())
        return DataLoader(parts, batch_size=None, sampler=sampler, **settings)  # type: ignore[arg-type]
    drop_last = kind.endswith("drop_last")
    sampler = {
        "torch": lambda: DistributedSampler(whole, shuffle=False, drop_last=drop_last, **ranks()),
        "shuffled": lambda: DistributedSampler(whole, shuffle=True, **ranks()),
        "strided": lambda: Strided(whole, drop_last=drop_last, **ranks()),
        "blocks": lambda: Blocks(samples, **ranks()),
        "wrapped": lambda: Wrapper(DistributedSampler(whole, **ranks())),
    }[kind.partition(" ")[0]]()
    if kind == "wrapped":
        own = BatchSampler(sampler, size, False)
        return DataLoader(whole, batch_sampler=own, **settings)  # type: ignore[arg-type]
    return DataLoader(whole, batch_size=size, sampler=sampler, drop_last=drop_last, **settings)  # type: ignore[arg-type]


KINDS = ("torch", "shuffled", "strided", "blocks", "wrapped", "growing", "ready batches")


def evaluate(kind: str, samples: int, size: int, **settings: Any) -> Any:
    accelerator = Accelerator()
    loader = accelerator.prepare(make_loader(kind, samples, size, **settings))
    seen, ends = [], []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).reshape(-1).tolist()
        words = accelerator.gather_for_metrics([str(index) for index in batch.tolist()])
        assert list(map(int, words)) == seen[len(seen) - len(words) :]
        ends.append(accelerator.gradient_state.end_of_dataloader)
    return sorted(seen), ends, loader.plan.mode


def evaluate_all(sizes: list[tuple[int, int]]) -> list[Any]:
    world = PartialState().num_processes
    cases = [(kind, *size) for kind in KINDS for size in sizes]
    return [(case, evaluate(*case)) for case in cases if is_possible(*case, world)]


def is_possible(kind: str, samples: int, size: int, world: int) -> bool:
    """Whether no rank is empty."""
    if kind == "growing":
        return samples > world * (world - 1) // 2
    if kind == "ready batches":
        samples = -(-samples // size)
    return kind not in ("blocks", "ready batches") or (world - 1) * -(-samples // world) < samples


def check_all(ranks: list[Any]) -> None:
    for cases in zip(*ranks, strict=True):
        for (kind, samples, size), (seen, ends, how) in cases:
            assert seen == list(range(samples)), (kind, samples, size)
            assert ends == [False] * (len(ends) - 1) + [True], (kind, samples, size)
            assert how == "already_sharded"
        assert len({len(ends) for _, (_, ends, _) in cases}) == 1, cases


@pytest.mark.parametrize("processes", [2, 3])
def test_each_sample_of_a_rank_aware_loader_is_gathered_once(run: Run, processes: int) -> None:
    check_all(run(evaluate_all, SIZES, processes=processes))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_each_sample_is_gathered_once_for_random_sizes(run: Run, processes: int) -> None:
    chance = random.Random(processes)
    sizes = [(chance.randint(1, 40), chance.randint(1, 6)) for _ in range(25)]
    check_all(run(evaluate_all, sizes, processes=processes, timeout=240))


# Settings


def read(loader: DataLoader[Any], **config: Any) -> tuple[list[int], Any]:
    """The samples that this rank reads, padding included, and the prepared loader."""
    prepared = Accelerator(dataloader_config=DataLoaderConfiguration(**config)).prepare(loader)
    return [sample for batch in prepared for sample in batch.reshape(-1).tolist()], prepared


def torch_loader(samples: int = 10, size: int = 2, **settings: Any) -> DataLoader[Any]:
    sampler: Any = DistributedSampler(data(samples), shuffle=False, **ranks())
    return DataLoader(data(samples), size, sampler=sampler, **settings)  # type: ignore[arg-type]


def prepare_with_settings() -> list[Any]:
    found = []
    for config in ({}, {"use_seedable_sampler": True}, {"even_batches": False}, {"split_batches": True}):
        seen, loader = read(torch_loader(), **config)
        found.append(
            (seen, len(loader), loader.total_batch_size, loader.total_dataset_length, loader.remainder)
        )
    seen, loader = read(torch_loader(num_workers=1))
    found.append((seen, len(loader), loader.total_batch_size, loader.total_dataset_length, loader.remainder))
    return found


def test_settings_of_already_sharded_loaders(run: Run) -> None:
    for rank, (plain, seedable, uneven, split, workers) in enumerate(run(prepare_with_settings)):
        mine = list(range(rank, 10, 2))
        assert plain == seedable == uneven == workers == (mine, 3, 4, 10, 2)
        assert split == (mine, 5, 2, 10, 2)  # batches of one sample on each rank


def message_of(error: type[Exception], loader: DataLoader[Any], **config: Any) -> str:
    with pytest.raises(error) as caught:
        read(loader, **config)
    return str(caught.value)


def prepare_loaders_that_do_not_fit() -> list[str]:
    def with_ranks(num_replicas: int, rank: int) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(data(8), num_replicas=num_replicas, rank=rank)
        return DataLoader(data(8), 2, sampler=sampler)  # type: ignore[arg-type]

    rank = PartialState().process_index
    growing: Any = GrowingBatches(8)
    return [
        message_of(ConfigurationError, with_ranks(4, rank)),
        message_of(ConfigurationError, with_ranks(2, 0)),
        message_of(ConfigurationError, torch_loader(), dispatch_batches=True),
        message_of(ConfigurationError, DataLoader(data(8), batch_sampler=growing), split_batches=True),  # type: ignore[arg-type]
    ]


def test_ranks_that_do_not_fit_and_contradicting_settings_raise_one_error(run: Run) -> None:
    first, second = run(prepare_loaders_that_do_not_fit)
    assert "num_replicas=4, rank=0" in first[0]
    assert "num_replicas=4, rank=1" in first[0] or "num_replicas=4, rank=1" not in second[0]
    assert all("data-parallel rank" in text and "already_sharded=True" in text for text in first[:2])
    assert first[1] == second[1]  # of the rank that does not fit, on all ranks
    assert "dispatch_batches=True" in first[2]
    assert "split_batches=True" in first[3]


def decide_explicitly() -> list[Any]:
    rank, world = PartialState().process_index, PartialState().num_processes
    whole = torch.arange(8)
    one_rank: Any = DistributedSampler(whole, num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
    return [
        read(torch_loader(8), already_sharded=False)[0],
        read(DataLoader(whole[rank::world], 2), already_sharded=True)[0],  # type: ignore[arg-type]
        read(DataLoader(whole, 2, sampler=one_rank))[0],  # type: ignore[arg-type]
        sorted(read(DataLoader(whole[rank::world], 2, shuffle=True), already_sharded=True)[0]),  # type: ignore[arg-type]
    ]


def test_already_sharded_decides_explicitly(run: Run) -> None:
    (twice, own, plain, shuffled), (twice_1, own_1, plain_1, shuffled_1) = run(decide_explicitly)
    assert (twice, twice_1) == ([0, 2], [5, 7])  # sharded a second time, as asked for
    assert (own, own_1) == (shuffled, shuffled_1) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert (plain, plain_1) == ([0, 1, 4, 5], [2, 3, 6, 7])


def log_of_prepare() -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(f"{record.levelname} {record.getMessage()}")  # type: ignore
    logger = logging.getLogger("accelerate.data_loader")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    read(torch_loader())
    return texts


def test_one_line_at_info_level_names_the_sampler(run: Run) -> None:
    first, second = run(log_of_prepare)
    (line,) = first
    assert line.startswith("INFO")
    assert "DistributedSampler(num_replicas=2, rank=0)" in line
    assert not second


# Samplers of unknown kind


class Unknown(Sampler[int]):
    """A sampler that does not say that it yields the shard of a rank."""

    def __init__(self, start: int, step: int, samples: int = 16) -> None:
        self.order = range(start, samples, step)
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Shuffled(Unknown):
    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__(0, 1)
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16, generator=self.generator).tolist())


def read_unknown_samplers() -> Any:
    rank, world = PartialState().process_index, PartialState().num_processes
    torch.manual_seed(rank)

    def loader(sampler: Any) -> DataLoader[Any]:
        return DataLoader(data(16), 2, sampler=sampler)

    once = Unknown(0, 1)
    same, prepared = read(loader(once))
    list(prepared)
    texts = [
        message_of(PreparationError, loader(Unknown(rank, world))),
        message_of(PreparationError, loader(SubsetRandomSampler(range(rank, 16, world)))),
    ]
    shuffles = [
        read(loader(Shuffled(None)))[0],
        read(loader(Shuffled(torch.Generator().manual_seed(rank))))[0],
        read(loader(RandomSampler(data(16))))[0],  # type: ignore[arg-type]
    ]
    kept = read(loader(Unknown(rank, world)), already_sharded=True)[0]
    return same, once.passes, texts, shuffles, kept


def test_unknown_samplers_are_compared_in_their_first_pass(run: Run) -> None:
    first, second = run(read_unknown_samplers)
    assert sorted(first[0] + second[0]) == list(range(16))
    assert first[1] == 2  # no pass of its own for the comparison
    assert first[2] == second[2]
    assert all("already_sharded=True" in text for text in first[2])
    assert first[2][0].startswith("Unknown begins with [0, 2] on rank 0 and with [1, 3] on rank 1")
    for mine, others in zip(first[3], second[3], strict=True):
        assert sorted(mine + others) == list(range(16))
    assert (first[4], second[4]) == (list(range(0, 16, 2)), list(range(1, 16, 2)))


class FromGlobalGenerator(Sampler[int]):
    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16).tolist())


def draw_different_numbers_between_passes() -> tuple[list[int], str]:
    torch.manual_seed(3)
    same, prepared = read(DataLoader(data(16), 2, sampler=FromGlobalGenerator()))
    torch.rand(PartialState().process_index + 1)
    with pytest.raises(PreparationError) as caught:
        list(prepared)
    return same, str(caught.value)


def test_orders_that_come_to_differ_are_an_error(run: Run) -> None:
    first, second = run(draw_different_numbers_between_passes)
    assert sorted(first[0] + second[0]) == list(range(16))
    assert first[1] == second[1]
    assert "FromGlobalGenerator begins with" in first[1]
    assert "give it a generator of its own, with an equal seed on all ranks" in first[1]


# Iterable datasets


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first(), 13, self.step()))

    def first(self) -> int:
        return 0

    def step(self) -> int:
        return 1


class ByAttributes(Stream):
    def __init__(self) -> None:
        self.num_replicas, self.rank = ranks().values()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 13, self.num_replicas))


class ByProcessGroup(Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 13, dist.get_world_size()))


class Around(Stream):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


class NamesItsRank(Stream):
    """Reads the rank for a message only."""

    def __iter__(self) -> Iterator[int]:
        self.message = f"rank {dist.get_rank()} begins"
        return super().__iter__()


class ByWorker(Stream):
    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, 13, worker.num_workers) if worker else range(13))


class Augmented(Stream):
    def __iter__(self) -> Iterator[int]:
        return (index + 100 * int(torch.randint(1, 9, ())) for index in range(13))


def gather(dataset: Any, workers: int = 0, **config: Any) -> tuple[str, list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(DataLoader(dataset, 2, num_workers=workers))
    return loader.plan.mode, sorted(
        x for batch in loader for x in accelerator.gather_for_metrics(batch).tolist()
    )


def read_streams() -> Any:
    aware = [
        gather(ByAttributes()),
        gather(ByAttributes(), dispatch_batches=False),
        gather(Around(ByAttributes())),
        gather(ByProcessGroup(), already_sharded=True),
    ]
    others = [gather(Stream()), gather(NamesItsRank()), gather(ByWorker()), gather(ByWorker(), workers=2)]
    sharded = gather(NamesItsRank(), dispatch_batches=False)
    return aware, others, sharded


def test_iterable_datasets_of_a_rank_are_read_whole(run: Run) -> None:
    for aware, others, sharded in run(read_streams):
        assert aware == [("dataset_shards", list(range(13)))] * len(aware)
        assert others == [("dispatch", list(range(13)))] * len(others)
        assert sharded == ("shard", list(range(13)))


class Files(Stream):
    """The files of a rank, chosen where it is built."""

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        return iter(self.files)


def read_unknown_streams() -> Any:
    rank, world = PartialState().process_index, PartialState().num_processes
    torch.manual_seed(rank)
    files = Files(list(range(rank, 13, world)))
    texts = [
        message_of(PreparationError, DataLoader(dataset, 2), dispatch_batches=False)
        for dataset in (files, ByProcessGroup())
    ]
    kept = gather(files, already_sharded=True)
    _, augmented = gather(Augmented(), dispatch_batches=False)
    one_shot: Any = Files(iter(range(13)))  # type: ignore[arg-type]
    return texts, kept, [x % 100 for x in augmented], gather(one_shot, dispatch_batches=False)[1]


def test_unknown_iterable_datasets_are_compared_in_their_first_pass(run: Run) -> None:
    for texts, kept, augmented, one_shot in run(read_unknown_streams):
        assert all("already_sharded=True" in text for text in texts)
        assert kept == ("dataset_shards", list(range(13)))
        assert sorted(augmented) == one_shot == list(range(13))


# Interrupted runs


class Noisy(torch.utils.data.Dataset[Any]):
    """Adds a random number to each index, as an augmentation does."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(()))


def build(kind: str, stateful: bool) -> tuple[Accelerator, Any]:
    shuffles = kind == "shuffled by each rank"
    config = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, already_sharded=True if shuffles else None
    )
    accelerator = Accelerator(dataloader_config=config)
    set_seed(5, device_specific=True)
    if shuffles:
        loader = DataLoader(Noisy(), 3, sampler=RandomSampler(Noisy(), replacement=True))
    else:
        made = make_loader(kind, 17, 2)
        loader = DataLoader(Noisy(), batch_sampler=made.batch_sampler)
    return accelerator, accelerator.prepare(loader)


def epochs(loader: Any, accelerator: Accelerator, count: int) -> list[Any]:
    return [
        (batch.tolist(), accelerator.gather_for_metrics(batch).tolist())
        for _ in range(count)
        for batch in loader
    ]


def resume(kinds: list[str], stateful: bool) -> list[Any]:
    found = []
    for kind in kinds:
        accelerator, loader = build(kind, stateful)
        whole = epochs(loader, accelerator, 2)
        for stop in (1, len(whole) // 2 - 1, len(whole) // 2):
            accelerator, loader = build(kind, stateful)
            before = []
            for batch in loader:
                before.append((batch.tolist(), accelerator.gather_for_metrics(batch).tolist()))
                if len(before) == stop:
                    accelerator.save_state("stopped")
                    break
            accelerator, loader = build(kind, stateful)
            torch.rand(7)
            accelerator.load_state("stopped")
            rest = loader if stateful else accelerator.skip_first_batches(loader, stop)
            after = epochs(rest, accelerator, 1) + epochs(loader, accelerator, 1)
            found.append((kind, stop, before + after, whole))
    return found


@pytest.mark.parametrize("stateful", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_interrupted_run_resumes_with_the_same_batches(
    run: Run, stateful: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = ["shuffled", "strided", "blocks", "growing", "shuffled by each rank"]
    for rank in run(resume, kinds, stateful, timeout=120):
        for kind, stop, interrupted, whole in rank:
            assert interrupted == whole, (kind, stop)


def skip_by_hand() -> Any:
    accelerator = Accelerator()
    loader = accelerator.prepare(make_loader("shuffled", 17, 2))
    first = epochs(loader, accelerator, 1)
    loader.set_epoch(0)
    skipped = epochs(skip_first_batches(loader, 3), accelerator, 1)
    second = epochs(loader, accelerator, 1)
    return first, skipped, second, len(skip_first_batches(loader, 3))


def test_skipped_batches_and_epochs(run: Run) -> None:
    for first, skipped, second, length in run(skip_by_hand):
        assert skipped == first[3:]
        assert length == len(first) - 3
        assert second != first  # the sampler gets the number of the epoch


def resume_on_another_number_of_ranks(folder: str, saves: bool) -> str:
    accelerator = Accelerator()
    loader = accelerator.prepare(torch_loader(12))
    if saves:
        for _ in loader:
            accelerator.save_state(folder)
            return ""
    accelerator.load_state(folder)
    with pytest.raises(CheckpointError) as caught:
        accelerator.skip_first_batches(loader, 1)
    return str(caught.value)


def test_an_epoch_resumes_on_the_same_number_of_ranks_only(run: Run, tmp_path: Any) -> None:
    folder = str(tmp_path / "stopped")
    run(resume_on_another_number_of_ranks, folder, True)
    for message in run(resume_on_another_number_of_ranks, folder, False, processes=3):
        assert "2 data-parallel groups" in message


# Training


def train() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    loader = accelerator.prepare(make_loader("growing", 30, 1))
    model, steps = accelerator.prepare(torch.nn.Linear(1, 1)), []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.reshape(-1, 1).float()).mean())
            steps.append(accelerator.sync_gradients)
    return steps


def test_gradients_are_synchronized_with_the_last_batch_of_uneven_ranks(run: Run) -> None:
    first, second = run(train)
    assert first == second == [False, False, True, True]


class Rebalancing(Sampler[list[int]]):
    """A batch sampler of a client: it knows its rank, and its trainer expects to find it unchanged."""

    def __init__(self) -> None:
        self.dp_size, self.rank = ranks().values()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = [(index + self.epoch) % 16 for index in range(16)]
        for start in range(2 * self.rank, 16, 2 * self.dp_size):
            yield order[start : start + 2]

    def __len__(self) -> int:
        return 16 // (2 * self.dp_size)


def prepare_as_a_trainer_does(passes_through: bool) -> Any:
    accelerator, sampler = Accelerator(), Rebalancing()
    loader = accelerator.prepare(DataLoader(data(16), batch_sampler=sampler))
    shard: Any = loader.batch_sampler
    assert type(shard) is BatchSamplerShard
    assert shard.batch_sampler is sampler
    if passes_through:
        shard.num_processes, shard.process_index = 1, 0
    assert len(loader) == 4
    seen = [[x for batch in loader for x in batch.tolist()] for _ in range(2)]
    assert sampler.epoch == 1
    return seen


@pytest.mark.parametrize("passes_through", [True, False])
def test_a_batch_sampler_of_a_trainer_is_found_and_may_be_passed_through(
    run: Run, passes_through: bool
) -> None:
    first, second = run(prepare_as_a_trainer_does, passes_through)
    for mine, others in zip(first, second, strict=True):
        assert sorted(mine + others) == list(range(16))
    assert first[0] != first[1]


class Infinite(Sampler[int]):
    def __init__(self) -> None:
        self.num_replicas, self.rank = ranks().values()

    def __iter__(self) -> Iterator[int]:
        return (index % 16 for index in itertools.count(self.rank, self.num_replicas))


def read_without_end() -> list[int]:
    loader = Accelerator().prepare(DataLoader(data(16), 2, sampler=Infinite()))
    return [x for batch in itertools.islice(loader, 6) for x in batch.tolist()]


def test_samplers_without_end_are_read(run: Run) -> None:
    first, second = run(read_without_end)
    assert first == [x % 16 for x in range(0, 24, 2)]
    assert second == [x % 16 for x in range(1, 25, 2)]


def prepare_empty_rank() -> str:
    loader = DataLoader(data(4), 2, sampler=Unknown(4 * ranks()["rank"], 1, 4))
    return message_of(PreparationError, loader, already_sharded=True)


def test_a_rank_without_batches_is_the_same_error_on_all_ranks(run: Run) -> None:
    first, second = run(prepare_empty_rank)
    assert first == second
    assert "[1] of 2 are empty" in first.replace("\n", " ")
