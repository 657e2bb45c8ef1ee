"""What the plan decides, as a table; nothing is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.stand_ins.streams import Stream
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate.base import ConfigurationError
from accelerate.data_loader import IterableDatasetShard, ShardPlan, data_groups
from accelerate.data_loader.native_sharding import may_read_native_shard
from accelerate.data_loader.plan import nominal_batch_size, plan


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
SHARED: DataLoader[Any] = DataLoader(IterableDatasetShard(Stream(8), 4, False, 2, 0), batch_size=4)
STREAMED: DataLoader[Any] = DataLoader(Stream(8), batch_size=4)


@pytest.mark.parametrize(
    ("loader", "asked", "how", "batch_size"),
    [
        (MAPPED, {"world": 1}, "unsharded", 4),
        (MAPPED, {}, "shard", 4),
        (MAPPED, {"split": True}, "shard", 2),
        (MAPPED, {"dispatch": True}, "dispatch", 4),
        (MAPPED, {"groups": 1}, "unsharded", 4),
        (STREAMED, {"world": 1}, "unsharded", 4),
        (STREAMED, {}, "dispatch", 4),
        (STREAMED, {"dispatch": False}, "shard", 4),
        (STREAMED, {"put_on_device": False}, "shard", 4),
        (STREAMED, {"groups": 1}, "dispatch", 4),
        (SHARED, {}, "shard", 4),
        (SHARED, {"dispatch": True}, "dispatch", 4),
        (SHARED, {"world": 3}, "dispatch", 4),
        (SHARED, {"group": 1}, "dispatch", 4),
        (DataLoader(IterableDatasetShard(Stream(8), 4), batch_size=4), {"world": 1}, "unsharded", 4),
        (DataLoader([1], batch_size=None), {}, "shard", None),
        (DataLoader([1], batch_sampler=[[0]]), {"split": True}, "shard", None),
    ],
)
def test_the_method_of_sharding_is_chosen(
    loader: DataLoader[Any], asked: dict[str, Any], how: str, batch_size: int | None
) -> None:
    decided = decide(loader, **asked)
    assert (decided.mode, decided.batch_size) == (how, batch_size)


@pytest.mark.parametrize(
    ("loader", "asked", "even"),
    [
        (MAPPED, {}, False),
        (MAPPED, {"dispatch": True}, True),
        (STREAMED, {}, True),
        (STREAMED, {"dispatch": False}, True),
        (STREAMED, {"native_shard": "it has shards"}, True),
    ],
)
def test_only_batch_samplers_may_end_unevenly(
    loader: DataLoader[Any], asked: dict[str, Any], even: bool
) -> None:
    assert decide(loader, even=False, **asked).even == even


def test_plans_are_printed_in_words() -> None:
    assert str(decide(MAPPED)) == "shard, part 0 of 2 (by the batch sampler)"
    assert str(decide(MAPPED, world=1)) == "unsharded (one process)"
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


@pytest.mark.parametrize(
    ("decided", "rows"),
    [
        (ShardPlan("shard", 2, 0, 3), 3),
        (ShardPlan("shard", 2, 0, 3, split=True), 6),
        (ShardPlan("dispatch", 4, 0, 3, split=True), 12),
        (ShardPlan("shard", 2, 0, None, split=True), None),
    ],
)
def test_rows_are_those_of_a_batch_of_the_dataset(decided: ShardPlan, rows: int | None) -> None:
    assert decided.rows_in_batch == rows


IN_FIVES = BatchSampler(SequentialSampler(range(8)), 5, drop_last=False)


class OfSizes(list[list[int]]):
    """Batches of a size for each of two kinds of sample."""

    batch_size = (2, 3)


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (MAPPED, 4),
        (DataLoader(range(8), batch_sampler=IN_FIVES), 5),  # type: ignore[arg-type]  # a range has a length
        (DataLoader(range(8), sampler=IN_FIVES, batch_size=None), 5),  # type: ignore[arg-type]
        (DataLoader(range(8), batch_sampler=OfSizes([[0, 1]])), None),  # type: ignore[arg-type]
        (DataLoader(range(8), batch_size=None), None),  # type: ignore[arg-type]
    ],
)
def test_the_batch_size_is_the_declared_one(loader: DataLoader[Any], size: int | None) -> None:
    assert nominal_batch_size(loader) == size
    assert isinstance(decide(MAPPED, split=True).batch_size, int)


@pytest.mark.parametrize(
    ("given", "dispatch", "drop_last", "shards", "allowed"),
    [
        (True, None, True, 5, True),
        (True, False, True, 5, True),
        (True, True, False, 4, False),
        (False, None, False, 5, True),
        (False, None, True, 4, False),
        (False, False, False, 4, True),
        (False, False, False, 2, True),
        (False, False, False, 5, False),
        (False, False, False, 1, False),
        (False, False, False, None, False),
        (False, False, True, 4, False),
        (False, True, False, 4, False),
    ],
)
@pytest.mark.parametrize("name", ["num_shards", "n_shards"])
def test_when_the_share_of_the_dataset_may_be_read(
    given: bool, dispatch: bool | None, drop_last: bool, shards: int | None, allowed: bool, name: str
) -> None:
    dataset = Stream(8)
    setattr(dataset, name, shards)
    loader = DataLoader(dataset, batch_size=4, drop_last=drop_last)
    assert may_read_native_shard(loader, 2, given=given, dispatch=dispatch) is allowed
