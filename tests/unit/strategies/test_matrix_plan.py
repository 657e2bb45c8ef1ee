"""Owners of matrices: each gets about the same number of bytes, and each box has one source."""

from __future__ import annotations

import math
import random

import pytest
import torch

from accelerate.base import PreparationError
from accelerate.checkpointing import Box
from accelerate.strategies.matrix_plan import LocalBox, by_dtype, plan_owners


def rows(shape: tuple[int, int], start: int, stop: int) -> Box:
    return (start, 0), (stop - start, shape[1])


def local(shape: tuple[int, int], box: Box | None, dtype: torch.dtype = torch.float32) -> LocalBox:
    return LocalBox(shape, dtype, box)


def sharded(shapes: dict[str, tuple[int, int]], size: int) -> list[dict[str, LocalBox]]:
    """Returns the boxes of each rank, where each matrix is sharded by rows as `torch.chunk` does."""
    ranks: list[dict[str, LocalBox]] = []
    for rank in range(size):
        boxes = {}
        for key, shape in shapes.items():
            chunk = -(-shape[0] // size)
            start, stop = min(rank * chunk, shape[0]), min((rank + 1) * chunk, shape[0])
            boxes[key] = local(shape, rows(shape, start, stop) if stop > start else None)
        ranks.append(boxes)
    return ranks


@pytest.mark.parametrize("seed", range(5))
def test_states_are_divided_evenly(seed: int) -> None:
    chance = random.Random(seed)
    widths = [64 * chance.randint(1, 8) for _ in range(12)]
    shapes = {
        f"{layer}.{name}": (width, 4 * width) if name == "up" else (width, width)
        for layer, width in enumerate(widths * 4)
        for name in ("query", "key", "up")
    }
    size = chance.choice([2, 3, 4, 8])
    matrices = plan_owners(sharded(shapes, size), {})
    held = [
        sum(math.prod(matrix.shape) for matrix in matrices if matrix.owner == rank) for rank in range(size)
    ]
    assert max(held) <= 1.05 * sum(held) / size


@pytest.mark.parametrize("seed", range(5))
def test_each_element_comes_from_one_rank_and_goes_to_all_its_holders(seed: int) -> None:
    chance = random.Random(seed)
    shapes = {str(number): (chance.randint(1, 9), chance.randint(1, 9)) for number in range(20)}
    ranks = sharded(shapes, 3)
    ranks = [*ranks, *ranks]  # two replicas
    for matrix in plan_owners(ranks, {}):
        whole = torch.zeros(matrix.shape)
        for rank, (offsets, sizes) in matrix.sources:
            assert ranks[rank][matrix.key].box == (offsets, sizes)
            whole[offsets[0] : offsets[0] + sizes[0]] += 1
        assert whole.eq(1).all()
        holders = [rank for rank, boxes in enumerate(ranks) if boxes[matrix.key].box is not None]
        assert [rank for rank, _ in matrix.copies] == [rank for rank in holders if rank != matrix.owner]
        own = ranks[matrix.owner][matrix.key].box
        assert own is None or (matrix.owner, own) in matrix.sources


def test_known_owners_are_kept() -> None:
    shapes = {"a": (4, 4), "b": (2, 2)}
    ranks = sharded(shapes, 2)
    assert {matrix.key: matrix.owner for matrix in plan_owners(ranks, {"a": 1, "b": 1})} == {"a": 1, "b": 1}
    assert {matrix.key: matrix.owner for matrix in plan_owners(ranks, {"b": 0})} == {"a": 1, "b": 0}


def test_a_parameter_is_owned_by_a_rank_that_has_it() -> None:
    shape = (4, 4)
    ranks = [{"a": local(shape, rows(shape, 0, 4))}, {"b": local(shape, rows(shape, 0, 4))}]
    matrices = {matrix.key: matrix for matrix in plan_owners(ranks, {})}
    assert [matrices[key].owner for key in "ab"] == [0, 1]
    assert all(matrix.is_whole and not matrix.copies for matrix in matrices.values())


@pytest.mark.parametrize("stop", [3, 5])
def test_boxes_that_do_not_make_up_a_matrix_are_refused(stop: int) -> None:
    shape = (6, 2)
    ranks = [{"a": local(shape, rows(shape, 0, stop))}, {"a": local(shape, rows(shape, 4, 6))}]
    with pytest.raises(PreparationError, match="overlap or are incomplete"):
        plan_owners(ranks, {})


def test_each_dtype_has_a_bucket() -> None:
    shape = (2, 2)
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32}
    ranks = [{key: local(shape, rows(shape, 0, 2), dtype) for key, dtype in dtypes.items()}]
    assert [[matrix.key for matrix in bucket] for bucket in by_dtype(plan_owners(ranks, {}))] == [
        ["a", "c"],
        ["b"],
    ]
