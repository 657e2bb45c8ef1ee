"""Which loaders are rank-aware, in one process that simulates every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from accelerate.base import ConfigurationError
from accelerate.data_loader import prepare_data_loader
from accelerate.data_loader.rank_aware import find_rank_attributes, nested_samplers
from accelerate.data_loader.stream_check import digest

pytestmark = pytest.mark.usefixtures("states")
DATA: Any = list(range(8))


class Mesh:
    """Two data-parallel ranks of two tensor-parallel ranks each."""

    mesh_dim_names = ("dp", "tp")
    mesh = torch.arange(4).reshape(2, 2)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def size(self) -> int:
        return 4

    def get_coordinate(self) -> list[int]:
        return [self.rank // 2, self.rank % 2]


def prepare(sampler: Any, processes: int = 2, rank: int = 1, **settings: Any) -> Any:
    loader = DataLoader(DATA, 2, sampler=sampler)
    return prepare_data_loader(loader, num_processes=processes, process_index=rank, **settings)


def distributed(num_replicas: int, rank: int) -> Any:
    return DistributedSampler(DATA, num_replicas=num_replicas, rank=rank, shuffle=False)


@pytest.mark.parametrize("rank", range(4))
def test_data_parallel_ranks_of_a_mesh_are_those_of_the_sampler(rank: int) -> None:
    loader = prepare(distributed(2, rank // 2), 4, rank, torch_device_mesh=Mesh(rank))
    assert loader.plan.mode == "already_sharded"
    assert [x for batch in loader for x in batch.tolist()] == DATA[rank // 2 :: 2]


@pytest.mark.parametrize(("num_replicas", "rank"), [(4, 3), (2, 0)])
def test_global_ranks_do_not_fit_a_mesh(num_replicas: int, rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"num_replicas={num_replicas}, rank={rank}.*rank 1 of 2"):
        prepare(distributed(num_replicas, rank), 4, 3, torch_device_mesh=Mesh(3))


@pytest.mark.parametrize(("processes", "already_sharded"), [(1, None), (1, True), (2, False)])
def test_one_process_and_false_keep_the_plan(processes: int, already_sharded: bool | None) -> None:
    loader = prepare(distributed(4, 0), processes, 0, already_sharded=already_sharded)
    assert loader.plan.mode == ("unsharded" if processes == 1 else "shard")


class Other:
    """A sampler with attributes of its own."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(DATA)

    def __len__(self) -> int:
        return len(DATA)


@pytest.mark.parametrize(
    ("sampler", "claims"),
    [
        (Other(num_replicas=2, rank=1), [(2, 1)]),
        (Other(world_size=4, rank=0), [(4, 0)]),
        (Other(data_parallel_size=2, data_parallel_rank=0), [(2, 0)]),
        (Other(num_replicas=1, rank=0), []),
        (Other(world_size=2), []),
        (Other(num_replicas=None, rank=None), []),
        (Other(num_replicas="2", rank="1"), []),
        (Other(sampler=Other(sampler=distributed(2, 1))), [(2, 1)]),
        (Other(inner=distributed(2, 1)), [(2, 1)]),
        (BatchSampler(distributed(2, 0), 2, False), [(2, 0)]),
        (BatchSampler(SequentialSampler(DATA), 2, False), []),
    ],
)
def test_ranks_are_found_in_nested_samplers(sampler: Any, claims: list[tuple[int, int]]) -> None:
    assert [(claim.size, claim.rank) for claim in find_rank_attributes(nested_samplers(sampler))] == claims


def test_other_attributes_that_do_not_fit_are_no_error() -> None:
    loader = prepare(Other(world_size=4, rank=1))
    assert loader.plan.mode == "shard"


class Stream(IterableDataset[int]):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


def test_digests_compare_values() -> None:
    sample = {"x": torch.arange(3), "y": ["a", 1.5, None], "z": torch.ones(2, dtype=torch.bfloat16)}
    equal = {"x": torch.arange(3), "y": ["a", 1.5, None], "z": torch.ones(2, dtype=torch.bfloat16)}
    assert digest(sample) == digest(equal)
    assert digest(object()) == digest(object())
    others = [
        {**sample, "x": torch.arange(1, 4)},
        {**sample, "y": ["a", 2.5, None]},
        [1, [2]],
        [[1], 2],
        "1",
        1,
    ]
    assert len({digest(other) for other in [sample, *others]}) == 7


class Shards(Stream):
    """Three shards."""

    num_shards = 3

    def __init__(self, shards: list[list[int]]) -> None:
        self.shards = shards

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return (sample for shard in self.shards for sample in shard)


@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_processes_without_a_process_group_read_their_own_shards(rank: int, dispatch: bool | None) -> None:
    loader = prepare_data_loader(
        DataLoader(Shards([[0, 1], [2], [3, 4, 5]]), 2),
        num_processes=3,
        process_index=rank,
        dispatch_batches=dispatch,
        put_on_device=True,
    )
    assert loader.plan.mode == "dataset_shards"
    assert [x for batch in loader for x in batch.tolist()] == [[0, 1], [2], [3, 4, 5]][rank]
