"""Local shards of tensors, and their offsets in the global tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given, strategies as st

from accelerate.checkpointing import LocalShards, PlainValue, boxes_of_range, shards_of_range, to_local_shards

SHAPES = st.lists(st.integers(1, 4), max_size=4)


@given(SHAPES, st.data())
def test_a_range_is_cut_into_boxes_that_hold_it_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    values = torch.arange(count)
    found = []
    for offsets, sizes in boxes_of_range(shape, start, stop):
        part = values.view(shape)
        for dim, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, begin, length)
        found += part.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(boxes_of_range(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_boxes_of_a_range_are_views_of_it(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    values = torch.arange(start, stop)
    full = torch.full(shape, -1)
    for shard in shards_of_range(values, shape, start):
        part = full
        for dim, (begin, length) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
            part = part.narrow(dim, begin, length)
        part.copy_(shard.tensor)
        assert shard.tensor.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    wanted = torch.full((count,), -1)
    wanted[start:stop] = values
    assert full.flatten().tolist() == wanted.tolist()


def test_replicated_tensors_are_saved_by_the_first_rank() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    first, second = to_local_shards(tensor, 0, 0), to_local_shards(tensor, 0, 1)
    assert isinstance(first, LocalShards)
    assert (first.shape, first.owned, second.owned) == ((2, 3), True, False)
    assert not first.shards[0].tensor.requires_grad
    assert to_local_shards("text", 3, 0) == PlainValue("text", True)
    assert to_local_shards("text", 3, 1) == PlainValue("text", False)
    assert to_local_shards(first, 1, 5) is first
