"""Which iterable datasets share themselves out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from accelerate.data_loader import is_the_same_everywhere, native_shard
from accelerate.ops import Transport


class Shards(IterableDataset[Any]):
    """Shards of numbers, shuffled by a generator deep inside."""

    def __init__(self, shards: list[list[int]], generator: Any = None) -> None:
        self.shards = shards
        self.steps = [{"shuffle": Inner(generator)}]

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return (item for shard in self.shards for item in shard)


class Inner:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


class OtherRank(Transport):
    """Two ranks, of which the other has a dataset of its own."""

    size = 2

    def __init__(self, others: Any) -> None:
        self.others = others

    def gather_object(self, obj: Any) -> list[Any]:
        transport = Transport()
        kept: list[Any] = []
        transport.gather_object = lambda theirs: kept.append(theirs) or [theirs]  # type: ignore
        is_the_same_everywhere(self.others, transport)
        return [obj, *kept]


def pipeline(*stages: str) -> Any:
    """What `webdataset` builds: an object with named stages."""
    kind = type("WebDataset", (), {"__module__": "webdataset.compat"})
    built: Any = kind()
    built.pipeline = [type("Stage", (), {"__name__": name})() for name in stages]
    return built


def test_shards_are_assigned_to_the_groups() -> None:
    whole = Shards([[0, 1], [2], [3, 4, 5]])
    shares = [native_shard(whole, 2, group) for group in range(2)]
    assert [list(share.dataset) for share in shares if share] == [[0, 1, 3, 4, 5], [2]]
    assert all(share and not share.is_given and "3 shards" in share.reason for share in shares)


def test_fewer_shards_than_groups_are_not_assigned() -> None:
    assert native_shard(Shards([[0], [1]]), 3, 0) is None


def test_plain_iterables_share_nothing() -> None:
    class Plain(IterableDataset[Any]):
        num_shards = 4

        def __iter__(self) -> Iterator[int]:
            return iter(())

    assert native_shard(Plain(), 2, 0) is None


@pytest.mark.parametrize(("stages", "splits"), [(("urls", "split_by_node"), True), (("urls",), False)])
def test_pipelines_that_split_by_node_are_already_sharded(stages: tuple[str, ...], splits: bool) -> None:
    dataset = pipeline(*stages)
    share = native_shard(dataset, 2, 1)
    assert (share is not None) == splits
    assert share is None or (share.dataset is dataset and share.is_given)


@pytest.mark.parametrize(
    "seeded",
    [
        lambda seed: torch.Generator().manual_seed(seed),
        random.Random,
        np.random.default_rng,
        np.random.RandomState,
    ],
)
def test_different_generator_seeds_make_datasets_differ(seeded: Any) -> None:
    shards = [[0], [1]]
    mine = Shards(shards, seeded(1))
    assert is_the_same_everywhere(mine, OtherRank(Shards(shards, seeded(1))))
    assert not is_the_same_everywhere(mine, OtherRank(Shards(shards, seeded(2))))
    assert not is_the_same_everywhere(mine, OtherRank(Shards(shards)))


def test_another_number_of_shards_makes_datasets_differ() -> None:
    assert not is_the_same_everywhere(Shards([[0], [1]]), OtherRank(Shards([[0], [1], [2]])))


def test_datasets_with_cyclic_references_are_compared_once() -> None:
    mine = Shards([[0]], random.Random(0))
    mine.steps.append({"again": mine})  # type: ignore[dict-item]
    assert is_the_same_everywhere(mine, OtherRank(mine))
