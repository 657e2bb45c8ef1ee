"""Prepared loaders on several processes: shards, shuffles, dispatch, random transforms, nesting, failures."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from accelerate.data_loader import (
    DataLoaderDispatcher,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import GradientState, PartialState

Run = Callable[..., list[Any]]


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any], fail_at: int | None = None) -> None:
        self.items, self.fail_at = items, fail_at

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.items):
            if number == self.fail_at:
                raise LookupError(f"sample {number} is lost")
            yield item


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Rare(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from self.items
        raise Unpicklable(1, 2)


class Noise(Dataset[Any]):
    """Each sample is what the three global generators of its process give."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())


def prepare(loader: DataLoader[Any], **config: Any) -> Any:
    PartialState()
    return prepare_data_loader(loader, put_on_device=True, rng_types=["generator"], **config)


def batches(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def real_batches(loader: Any, rank: int) -> list[Any]:
    """The batches of one pass without what fills them up."""
    return [batch.tolist()[: loader.valid_counts[rank] if loader.valid_counts else None] for batch in loader]


CONFIGS: list[dict[str, Any]] = [{}, {"use_seedable_sampler": True}, {"dispatch_batches": True}]


def read_shuffled() -> list[list[Any]]:
    rank = PartialState().process_index
    passes = []
    for config in CONFIGS:
        for seed in (None, rank + 7):  # each process for itself: only the loader can bring them together
            torch.manual_seed(rank + 1)
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            loader = DataLoader(list(range(17)), batch_size=3, shuffle=True, generator=generator)
            prepared = prepare(loader, even_batches=False, **config)
            passes += [real_batches(prepared, rank), real_batches(prepared, rank)]
    return passes


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_shuffle_in_the_same_order(run: Run, processes: int) -> None:
    passes = []
    for ranks in zip(*run(read_shuffled, processes=processes), strict=True):
        passes.append([sample for rank in ranks for batch in rank for sample in batch])
    assert all(sorted(seen) == list(range(17)) for seen in passes)
    assert all(first != second for first, second in zip(passes[::2], passes[1::2], strict=True))


def read_in_constant_memory(dispatch: bool | None) -> list[Any]:
    torch.manual_seed(PartialState().process_index + 1)
    loader = DataLoader(range(9000), batch_size=50, shuffle=True)  # type: ignore[arg-type]
    prepared = prepare(
        loader, dispatch_batches=dispatch, even_batches=False, use_constant_memory_sampler=True, data_seed=4
    )
    return [batches(prepared) for _ in range(2)]


@pytest.mark.parametrize(
    "dispatch", [None, pytest.param(True, marks=pytest.mark.slow)], ids=["sharded", "dispatched"]
)
def test_a_computed_order_is_the_same_for_any_number_of_processes(run: Run, dispatch: bool | None) -> None:
    orders = []
    for processes in (1, 2, 3):
        passes = zip(*run(read_in_constant_memory, dispatch, processes=processes), strict=True)
        global_batches = (batch for ranks in passes for one in zip(*ranks, strict=True) for batch in one)
        orders.append([sample for batch in global_batches for sample in batch])
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0][:9000]) == sorted(orders[0][9000:]) == list(range(9000))
    assert orders[0][:9000] != orders[0][9000:]


def read_custom_sampler(kind: str) -> list[Any]:
    torch.manual_seed(PartialState().process_index)
    weighted = WeightedRandomSampler([1.0] * 12, 12, replacement=False)
    sampler = SeedableRandomSampler(range(12)) if kind == "seedable" else weighted
    return batches(prepare(DataLoader(list(range(12)), sampler=sampler, batch_size=3)))


@pytest.mark.parametrize("kind", ["weighted", "seedable"])
def test_samplers_with_a_generator_have_the_same_order_on_all_ranks(run: Run, kind: str) -> None:
    ranks = run(read_custom_sampler, kind)
    assert sorted(sample for rank in ranks for batch in rank for sample in batch) == list(range(12))


def read_noise(persistent: bool) -> list[Any]:
    torch.manual_seed(5)
    loader = DataLoader(
        Noise(),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=1,
        shuffle=True,
        persistent_workers=persistent,
    )
    prepared = prepare(loader)
    seen = [[column.tolist() for batch in prepared for column in batch] for _ in range(2)]
    del prepared
    return seen


def test_random_transforms_in_workers_differ_between_processes_and_epochs(run: Run) -> None:
    found = run(call_for_each, read_noise, [False, True])  # whether workers are persistent
    for ranks in zip(*found, strict=True):
        values = [value for rank in ranks for epoch in rank for column in epoch for value in column]
        assert len(values) == 2 * 2 * 4 * 3
        assert len(set(values)) == len(values)


def read_dispatched(items: Any, batch_size: int, **config: Any) -> list[Any]:
    prepared = prepare(DataLoader(Stream(items), batch_size=batch_size), **config)
    assert isinstance(prepared, DataLoaderDispatcher)
    return [
        (batch, prepared.end_of_dataloader, prepared.remainder, prepared.valid_counts) for batch in prepared
    ]


CASES = list(product([False, True], [False, True], [1, 2, 12, 13, 17]))


def read_all_cases(processes: int) -> list[list[Any]]:
    return [
        read_dispatched(range(size), 2 * processes if split else 2, split_batches=split, even_batches=even)
        for split, even, size in CASES
    ]


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_dispatched_samples_are_the_dataset_once(run: Run, processes: int) -> None:
    answers = run(read_all_cases, processes, processes=processes)
    for (*_, size), *ranks in zip(CASES, *answers, strict=True):
        seen = []
        for step in range(max(map(len, ranks))):
            for rank, steps in enumerate(ranks):
                if step < len(steps):
                    batch, is_last, _, counts = steps[step]
                    assert is_last == (step == len(steps) - 1)
                    seen += batch.tolist()[: counts[rank] if counts else None]
        assert seen == list(range(size))
        assert len({len(steps) for steps in ranks}) == 1


MIXED = [
    {
        "x": torch.full((2,), float(i)),
        "flag": torch.tensor(i % 2 == 0),
        "text": f"sample {i}",
        "z": (i, [torch.tensor(1j * i)]),
    }
    for i in range(7)
]


def read_mixed() -> list[Any]:
    return read_dispatched(MIXED, 2)


def test_dispatched_batches_may_hold_anything(run: Run) -> None:
    ranks = run(read_mixed)
    assert [batch["text"] for batch, *_ in ranks[0]] == [["sample 0", "sample 1"], ["sample 4", "sample 5"]]
    assert [batch["text"] for batch, *_ in ranks[1]] == [["sample 2", "sample 3"], ["sample 6", "sample 0"]]
    batch, is_last, remainder, counts = ranks[1][-1]
    assert (is_last, remainder, counts) == (True, 3, (2, 1))
    assert batch["x"].tolist() == [[6.0, 6.0], [0.0, 0.0]]
    assert batch["flag"].dtype == torch.bool
    assert batch["flag"].tolist() == [True, True]
    assert batch["z"][0].tolist() == [6, 0]
    assert batch["z"][1][0].tolist() == [6j, 0j]


def cut_in_reverse(batch: Any, span: slice, process_index: int, num_processes: int) -> Any:
    start, stop = span.start, span.stop
    return batch[len(batch) - stop : len(batch) - start] * 10 + process_index


def read_cut() -> list[Any]:
    return read_dispatched([0, 1, 2, 3], 2, slice_fn_for_dispatch=cut_in_reverse)


def test_slice_fn_cuts_the_dispatched_batch(run: Run) -> None:
    ranks = run(read_cut)
    assert [batch.tolist() for batch, *_ in ranks[0]] == [[20, 30]]
    assert [batch.tolist() for batch, *_ in ranks[1]] == [[1, 11]]


def ragged(samples: list[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.full((n + 1,), n) for n in samples], batch_first=True)


def read_ragged() -> list[Any]:
    loader = DataLoader(Stream(list(range(8))), batch_size=2, collate_fn=ragged)
    return [tuple(batch.shape) for batch in prepare(loader)]


def test_dispatched_batches_may_be_ragged(run: Run) -> None:
    assert run(read_ragged) == [[(2, 2), (2, 6)], [(2, 4), (2, 8)]]


def read_until_failure(kind: str, workers: int) -> tuple[list[Any], str, str, str]:
    dataset = Rare(list(range(4))) if kind == "rare" else Stream(list(range(20)), fail_at=11)
    prepared = prepare(DataLoader(dataset, batch_size=2, num_workers=workers))
    seen: list[Any] = []
    try:
        for batch in prepared:
            seen.append(batch.tolist())
    except Exception as error:
        assert GradientState().active_dataloader is None
        return seen, type(error).__name__, str(error), str(error.__cause__)
    return seen, "", "", ""


def test_an_exception_in_the_dataset_of_process_0_is_raised_everywhere(run: Run) -> None:
    found = run(call_for_each, read_until_failure, [("common", 0), ("common", 1)])
    for ranks in zip(*found, strict=True):  # without and with a worker
        assert ranks[0][0] == [[0, 1]]
        assert ranks[1][0] == [[2, 3]]
        for _, kind, text, _ in ranks:
            assert kind == "LookupError"
            assert "sample 11 is lost" in text
        assert "rank 0" in ranks[1][3]
        assert "in __iter__" in ranks[1][3]


def test_an_exception_that_cannot_be_pickled_is_raised_with_its_text(run: Run) -> None:
    ranks = run(read_until_failure, "rare", 0)
    assert ranks[0][1] == "Unpicklable"
    assert ranks[1][1] == "RuntimeError"
    assert "1 and 2" in ranks[1][2]


def read_nested() -> list[Any]:
    gradient_state = GradientState()
    outer = prepare(DataLoader(list(range(8)), batch_size=2))
    inner = prepare(DataLoader(list(range(3)), batch_size=1))
    seen: list[Any] = []
    for batch in outer:
        assert gradient_state.active_dataloader is outer
        for number, _ in enumerate(inner):
            assert gradient_state.active_dataloader is inner
            assert gradient_state.end_of_dataloader == (number == 1)
            seen.append(inner.valid_counts)
            if batch[0] > 3:
                break
        assert gradient_state.active_dataloader is outer
        seen.append(gradient_state.end_of_dataloader)
    assert gradient_state.active_dataloader is None
    return seen


def test_loaders_may_be_nested(run: Run) -> None:
    assert run(read_nested) == [[None, (1, 0), False, None, True]] * 2


def read_after_skip(dispatch: bool, iterable: bool) -> list[Any]:
    dataset: Any = Stream(list(range(13))) if iterable else list(range(13))
    prepared = prepare(DataLoader(dataset, batch_size=2), dispatch_batches=dispatch)
    skipped: Any = skip_first_batches(prepared, 2)
    seen = [(batch.tolist(), skipped.end_of_dataloader, skipped.valid_counts) for batch in skipped]
    assert iterable or len(skipped) == len(seen) == len(prepared) - 2
    assert prepared.iteration == 1
    return seen


def test_skipped_loaders_keep_the_valid_counts(run: Run) -> None:
    cases = list(product([False, True], repeat=2))  # whether it dispatches, and iterates
    found = zip(*run(call_for_each, read_after_skip, cases), strict=True)
    for case, ranks in zip(cases, found, strict=True):
        real = []
        for step in zip(*ranks, strict=True):
            for rank, (batch, is_last, counts) in enumerate(step):
                assert is_last == (step[0] is ranks[0][-1]), case
                real += batch[: counts[rank] if counts else None]
        assert real == list(range(8, 13)), case


def read_on_a_mesh() -> tuple[list[Any], list[Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    state = PartialState()
    torch.manual_seed(state.process_index)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    shuffled = prepare(DataLoader(list(range(6)), batch_size=2, shuffle=True), torch_device_mesh=mesh)
    streamed = prepare(DataLoader(Stream(list(range(5))), batch_size=2), torch_device_mesh=mesh)
    assert isinstance(streamed, DataLoaderDispatcher)
    return batches(shuffled), batches(streamed)


def test_ranks_along_a_tensor_axis_share_their_batches(run: Run) -> None:
    first, second = run(read_on_a_mesh)
    assert first == second
    assert sorted(sample for batch in first[0] for sample in batch) == list(range(6))
    assert first[1] == [[0, 1], [2, 3], [4]]


def read_empty() -> list[Any]:
    return batches(prepare(DataLoader(Stream([]), batch_size=2)))


def test_an_empty_dispatched_loader_yields_no_batch(run: Run) -> None:
    assert run(read_empty) == [[], []]


def draws_after_passes(settings: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    loader = prepare(DataLoader(Stream(list(range(5))), batch_size=2, **settings))
    found = []
    for stop in (1, 9, 9):
        for _ in zip(range(stop), loader, strict=False):
            pass
        found.append(torch.rand(()).item())
    return found


def test_equally_seeded_ranks_stay_equal_after_a_dispatched_stream(run: Run) -> None:
    settings = [{}, {"num_workers": 1, "persistent_workers": True}]
    ranks = run(call_for_each, draws_after_passes, settings)
    assert ranks[0] == ranks[1]


def test_the_prepared_sampler_is_not_the_users(states: None) -> None:
    loader = DataLoader(list(range(4)), shuffle=True)
    prepare_data_loader(loader, num_processes=2, process_index=0)
    assert isinstance(loader.sampler, RandomSampler)
    assert loader.sampler.generator is None


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "accelerate-read-ahead"]


class Endless(IterableDataset[int]):
    """Samples without end; each contains the threads that have read so far."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[int]:
        for number in count():
            self.threads.add(threading.current_thread().name)
            yield number


def read_and_leave(how: str) -> tuple[int, list[str], set[str]]:
    dataset = Endless()
    loader = prepare(DataLoader(dataset, batch_size=2))
    seen = 0
    if how == "break":
        for _ in loader:
            seen += 1
            if seen == 20:
                break
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            for _ in loader:
                seen += 1
                1 / (seen - 20)
    else:
        iterator = iter(loader)
        for _ in range(20):
            next(iterator)
            seen += 1
        del iterator
    return seen, reading_threads(), dataset.threads


def test_reading_ahead_leaves_no_thread(run: Run) -> None:
    ways = ["break", "error", "delete"]
    first, others = run(call_for_each, read_and_leave, ways)
    for way, (seen, left, threads), other in zip(ways, first, others, strict=True):
        assert (seen, left) == (20, []), way
        assert "accelerate-read-ahead" in threads, way
        assert other == (20, [], set()), way


class RandomStream(IterableDataset[float]):
    """Random samples, drawn from the generator of the process that also trains."""

    def __iter__(self) -> Iterator[float]:
        return (torch.rand(()).item() for _ in range(40))


def train_on_random_samples() -> tuple[list[float], list[str]]:
    torch.manual_seed(3)
    numbers = []
    threads = []
    for batch in prepare(DataLoader(RandomStream(), batch_size=2)):
        threads += reading_threads()
        numbers += [*batch.tolist(), torch.rand(()).item()]  # as dropout would
    return numbers, threads


def test_prefetching_that_draws_random_numbers_is_reproducible(run: Run) -> None:
    ((first, threads), (second, _)), _ = run(call_for_each, train_on_random_samples, [(), ()])
    assert threads == []
    assert second == first


def resume_dispatched(stop: int) -> tuple[list[Any], list[Any]]:
    warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata's own

    def make() -> Any:
        return prepare(
            DataLoader(list(range(40)), batch_size=2),  # type: ignore[arg-type]
            dispatch_batches=True,
            use_stateful_dataloader=True,
        )

    loader = make()
    whole = batches(loader)
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    position = copy.deepcopy(loader.state_dict()) if PartialState().is_main_process else None
    del iterator
    late = make()
    if position is not None:
        late.load_state_dict(position)
    return whole[stop:], batches(late)


def test_prefetched_batches_are_not_part_of_the_position(run: Run) -> None:
    for found in run(call_for_each, resume_dispatched, [1, 7]):
        for expected, seen in found:
            assert seen == expected


def read_an_uneven_stream() -> list[Any]:
    loader = prepare(DataLoader(Stream(list(range(10))), batch_size=2), even_batches=False)
    return [(batch.tolist(), loader.end_of_dataloader, loader.valid_counts) for batch in loader]


def test_the_last_batch_of_a_dispatched_stream_is_split_between_ranks(run: Run) -> None:
    first, second = run(read_an_uneven_stream)
    assert [batch for batch, *_ in first] == [[0, 1], [4, 5], [8]]
    assert [batch for batch, *_ in second] == [[2, 3], [6, 7], [9]]
    assert [is_last for _, is_last, _ in first] == [False, False, True]
    assert [is_last for _, is_last, _ in second] == [False, False, True]
