"""What the plan decides, as a table; nothing is read."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.base import ConfigurationError
from accelerate.data_loader import IterableDatasetShard, ShardPlan, data_groups
from accelerate.data_loader.plan import plan


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def decide(loader: DataLoader[Any], world: int = 2, **changed: Any) -> ShardPlan:
    asked: dict[str, Any] = {
        "num_processes": world,
        "groups": world,
        "group": 0,
        "split": False,
        "even": True,
        "dispatch": None,
        "put_on_device": True,
        **changed,
    }
    return plan(loader, **asked)


MAPPED = DataLoader(list(range(8)), batch_size=4)
SHARED: DataLoader[Any] = DataLoader(IterableDatasetShard(Stream(), 4, False, 2, 0), batch_size=4)
STREAMED: DataLoader[Any] = DataLoader(Stream(), batch_size=4)


@pytest.mark.parametrize(
    ("loader", "asked", "how", "batch_size"),
    [
        (MAPPED, {"world": 1}, "leave", 4),
        (MAPPED, {}, "shard", 4),
        (MAPPED, {"split": True}, "shard", 2),
        (MAPPED, {"dispatch": True}, "dispatch", 4),
        (MAPPED, {"groups": 1}, "leave", 4),
        (STREAMED, {"world": 1}, "leave", 4),
        (STREAMED, {}, "dispatch", 4),
        (STREAMED, {"dispatch": False}, "shard", 4),
        (STREAMED, {"put_on_device": False}, "shard", 4),
        (STREAMED, {"groups": 1}, "dispatch", 4),
        (SHARED, {}, "shard", 4),
        (SHARED, {"dispatch": True}, "dispatch", 4),
        (SHARED, {"world": 3}, "dispatch", 4),
        (SHARED, {"group": 1}, "dispatch", 4),
        (DataLoader([1], batch_size=None), {}, "shard", None),
        (DataLoader([1], batch_sampler=[[0]]), {"split": True}, "shard", None),
    ],
)
def test_how(loader: DataLoader[Any], asked: dict[str, Any], how: str, batch_size: int | None) -> None:
    decided = decide(loader, **asked)
    assert (decided.how, decided.batch_size) == (how, batch_size)


@pytest.mark.parametrize(
    ("loader", "asked", "even"),
    [
        (MAPPED, {}, False),
        (MAPPED, {"dispatch": True}, True),
        (STREAMED, {}, True),
        (STREAMED, {"dispatch": False}, True),
        (STREAMED, {"own_share": "it has shards"}, True),
    ],
)
def test_only_batch_samplers_may_end_unevenly(
    loader: DataLoader[Any], asked: dict[str, Any], even: bool
) -> None:
    assert decide(loader, even=False, **asked).even == even


def test_it_can_be_read() -> None:
    assert str(decide(MAPPED)) == "shard, part 0 of 2 (by the batch sampler)"
    assert str(decide(MAPPED, world=1)) == "leave (one process)"
    assert str(decide(SHARED)) == "shard, part 0 of 2 (the dataset is sharded already)"
    assert "dispatch_batches=False" in str(decide(STREAMED))


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_size=4: .* 3 equal parts"):
        decide(MAPPED, world=3, split=True)
    with pytest.raises(ConfigurationError, match="dispatch_batches=True"):
        decide(MAPPED, dispatch=True, put_on_device=False)


@pytest.mark.parametrize(
    ("names", "place", "expected"),
    [
        (("dp_replicate", "dp_shard", "tp"), [1, 0, 1], (4, 2)),
        (("dp_shard", "cp", "tp"), [1, 1, 0], (2, 1)),
        (("tp", "cp", "sp"), [1, 1, 1], (1, 0)),
        ((), [1, 1, 1], (8, 5)),
    ],
)
def test_ranks_that_share_a_batch_are_one_group(
    names: tuple[str, ...], place: list[int], expected: tuple[int, int]
) -> None:
    mesh = SimpleNamespace(
        mesh_dim_names=names, mesh=torch.zeros(2, 2, 2), size=lambda: 8, get_coordinate=lambda: place
    )
    assert data_groups(mesh, 8, 5) == expected


def test_groups_that_are_counted_already_are_kept() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("tp",), size=lambda: 8)
    assert data_groups(mesh, 2, 1) == (2, 1)
    assert data_groups(None, 8, 3) == (8, 3)
