"""Flattening nested tensors, packing them into bytes, and unpacking; no processes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from accelerate.ops import packing
from accelerate.ops.base import Header
from accelerate.ops.packing import (
    SEPARATE_BYTES,
    TransferPlan,
    fingerprint_of,
    flatten_structure,
    joined_shape,
    plan_transfer,
    unflatten_structure,
)

Pair = namedtuple("Pair", ["first", "second"])
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.complex64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = int(torch.Size(shape).numel())
    tensor = (torch.arange(count) % 3).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else tensor


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", 3])
    return st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
    )


@st.composite
def alike(draw: st.DrawFn) -> list[torch.Tensor]:
    first = draw(tensors())
    return [first, *(first.roll(1).clone() for _ in range(draw(st.integers(1, 4))))]


structures = st.one_of(st.recursive(tensors(), containers, max_leaves=12), alike())
rooms = st.sampled_from([-1, 0, 64, 10**6])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def buffers_of(plan: TransferPlan) -> list[Any]:
    return [plan.in_header, *plan.buffers] if plan.in_header is not None else list(plan.buffers)


@given(structures)
def test_taken_apart_data_is_put_together_unchanged(data: Any) -> None:
    parts = flatten_structure(data)
    again = unflatten_structure(data, iter(parts.leaves))
    assert type(again) is type(data)
    assert all(a is b for a, b in zip(flatten_structure(again).leaves, parts.leaves, strict=True))
    assert flatten_structure(again).containers == parts.containers


@given(structures, rooms, st.booleans())
def test_each_leaf_is_sent_once(data: Any, capacity: int, mixed: bool) -> None:
    parts = flatten_structure(data)
    plan = plan_transfer("op", parts, size=2, capacity=capacity, mixed=mixed)
    segments = [segment for buffer in buffers_of(plan) for segment in buffer.segments]
    places = [*plan.separate, *plan.empty, *(place for segment in segments for place in segment.indices)]
    assert sorted(places) == list(range(len(parts.leaves)))
    assert plan.in_header is None or plan.in_header.width <= capacity
    for buffer in buffers_of(plan):
        assert [segment.start % 16 for segment in buffer.segments] == [0] * len(buffer.segments)
        assert all(segment.stop <= buffer.width for segment in buffer.segments)


@given(structures, rooms, st.integers(2, 4))
def test_rows_of_all_processes_are_joined_leaf_by_leaf(data: Any, capacity: int, size: int) -> None:
    parts = flatten_structure(data)
    plan = plan_transfer("op", parts, size=size, capacity=capacity)
    results: dict[int, torch.Tensor] = {}
    for buffer in buffers_of(plan):
        sent = buffer.pack(parts.leaves)
        assert sent.dtype == torch.uint8
        assert sent.numel() == buffer.width
        joined = torch.stack([sent] * size)
        for segment in buffer.segments:
            segment.split_rows(segment.read(joined), results)  # type: ignore[arg-type]  # filled by place
    for place, result in results.items():
        leaf = parts.leaves[place]
        assert same(result, torch.cat([leaf.reshape(1) if leaf.ndim == 0 else leaf] * size))
        assert result.is_contiguous()


@given(structures, st.integers(2, 4))
def test_leaves_are_read_from_the_headers(data: Any, size: int) -> None:
    def everywhere(joined: torch.Tensor, sent: torch.Tensor) -> None:
        joined.view(size, -1).copy_(sent.expand(size, -1))

    header = Header(size, everywhere)
    parts = flatten_structure(data)
    whole = plan_transfer("op", parts, size=size, capacity=header.capacity).in_header
    assert whole is not None
    for _ in range(3):  # the way is found at the first use, kept at the second, used at the third
        results: dict[int, torch.Tensor] = {}
        whole.send(parts.leaves, header)
        assert header.exchange(1)
        for segment in whole.segments:
            segment.receive(header, results)  # type: ignore[arg-type]  # filled by place
        header.exchange(2)
        for place, result in results.items():
            leaf = parts.leaves[place]
            assert same(result, torch.cat([leaf.reshape(1) if leaf.ndim == 0 else leaf] * size))
            assert result.is_contiguous()


@given(structures)
def test_leaves_are_overwritten_in_place(data: Any) -> None:
    parts = flatten_structure(data)
    plan = plan_transfer("op", parts, size=2, capacity=10**6)
    assert plan.in_header is not None
    sent = plan.in_header.pack(parts.leaves).clone()
    leaves = [torch.zeros_like(leaf) for leaf in parts.leaves]
    for segment in plan.in_header.segments:
        segment.overwrite(segment.read(sent), leaves)
    assert all(same(a, b) for a, b in zip(leaves, parts.leaves, strict=True))


@given(structures)
def test_elements_are_split_into_leaves(data: Any) -> None:
    parts = flatten_structure(data)
    plan = plan_transfer("op", parts, size=2, capacity=10**6)
    results: dict[int, torch.Tensor] = {}
    for segment in plan.in_header.segments:  # type: ignore[union-attr]
        segment.split(segment.flatten(parts.leaves), results)  # type: ignore[arg-type]  # filled by place
    assert all(same(result, parts.leaves[place]) for place, result in results.items())


def test_large_leaves_are_sent_alone_and_small_ones_in_bounded_buffers() -> None:
    large, small = (torch.zeros(SEPARATE_BYTES - less, dtype=torch.uint8) for less in (0, 1))
    parts = flatten_structure([large, *[small] * 40])
    plan = plan_transfer("op", parts, size=2, capacity=100)
    assert plan.separate == (0,)
    total = sum(leaf.numel() for leaf in parts.leaves)
    assert len(plan.buffers) > 3
    assert all(buffer.width <= total / 4 for buffer in plan.buffers)


def test_a_buffer_holds_one_dtype_where_numbers_are_combined() -> None:
    parts = flatten_structure(
        [torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(3).long()]
    )
    assert len(plan_transfer("op", parts, size=2, capacity=-1).buffers) == 1
    assert len(plan_transfer("op", parts, size=2, capacity=-1, mixed=False).buffers) == 2


@pytest.mark.parametrize(
    "other",
    [
        [[torch.ones(2)], torch.ones(2)],
        [torch.ones(2), [torch.ones(2)], []],
        {"a": torch.ones(2), "b": [torch.ones(2)]},
        [torch.ones(2), [torch.ones(2, dtype=torch.float64)]],
        [torch.ones(2), [torch.ones(2, 1)]],
    ],
)
def test_another_structure_has_another_mark(other: Any) -> None:
    def mark(data: Any, name: str = "op") -> int:
        return plan_transfer(name, flatten_structure(data), size=2, capacity=-1).fingerprint

    one = [torch.ones(2), [torch.ones(2)]]
    assert mark(one) == mark((torch.zeros(2), (torch.zeros(2),)))
    assert mark(one) != mark(other)
    assert mark(one) != mark(one, "another")


def test_a_mark_is_64_bits_and_the_same_everywhere() -> None:
    assert fingerprint_of("gather", [2, 3]) == fingerprint_of("gather", [2, 3])
    assert -(2**63) <= fingerprint_of("gather") < 2**63


def test_other_leaves_and_several_devices_are_refused() -> None:
    with pytest.raises(TypeError, match="was given str"):
        flatten_structure([torch.ones(1), "text"])
    with pytest.raises(ValueError, match="are on cpu, meta"):
        flatten_structure([torch.ones(1), torch.ones(1, device="meta")])


def test_leaves_that_fill_the_header_exactly_are_sent_in_it() -> None:
    parts = flatten_structure([torch.zeros(5), torch.zeros(3, dtype=torch.int64)])
    whole = plan_transfer("op", parts, size=2, capacity=10**6).in_header
    assert whole is not None
    assert plan_transfer("op", parts, size=2, capacity=whole.width).in_header == whole
    assert plan_transfer("op", parts, size=2, capacity=whole.width - 1).in_header is None


def test_buffers_are_filled_up_to_their_limit() -> None:
    lengths, dtypes = [4, 4, 1, 3, 8], (torch.int8, torch.int8, torch.int8, torch.uint8, torch.int8)
    assert packing._assign_to_buckets([0, 1, 2, 3, 4], lengths, 8, dtypes, True) == [[0, 1], [2, 3], [4]]
    assert packing._assign_to_buckets([0, 1, 2, 3, 4], lengths, 8, dtypes, False) == [[0, 1], [2], [4], [3]]
    assert packing._assign_to_buckets([4, 0, 1], lengths, 6, dtypes, True) == [[4], [0], [1]]


def segment_of(data: Any) -> Any:
    """Returns the first segment of a plan that sends all leaves in the header."""
    plan = plan_transfer("op", flatten_structure(data), size=2, capacity=999)
    assert plan.in_header is not None
    return plan.in_header.segments[0]


def test_rows_of_all_processes_are_joined_in_the_first_dimension() -> None:
    assert joined_shape(torch.Size([2, 5]), 3) == (6, 5)
    assert joined_shape(torch.Size([]), 3) == (3,)


def test_results_do_not_track_each_other() -> None:
    leaves = [torch.ones(2), torch.ones(2)]
    segment = segment_of(leaves)
    results: list[Any] = [None, None]
    segment.split(segment.flatten(leaves), results)
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * results[0]).sum()
    results[1].add_(1)
    loss.backward()
    assert results[0].tolist() == [1.0, 1.0]


def test_leaves_of_another_memory_format_are_read_in_order() -> None:
    image = torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)
    assert segment_of([image, image]).flatten([image, image]).tolist() == [*range(16), *range(16)]


def test_conjugate_leaves_are_overwritten() -> None:
    leaf = torch.zeros(2, dtype=torch.complex64).conj()
    segment_of([leaf]).overwrite(torch.tensor([1j, 2]), [leaf])
    assert leaf.tolist() == [1j, 2]


def test_conjugate_and_negative_views_are_written_out() -> None:
    number = torch.tensor([1 + 2j])
    for leaves, expected in (
        ([number.conj()], [1 - 2j]),
        ([number.conj(), number.conj()], [1 - 2j] * 2),
        ([number.conj().imag], [-2.0]),
    ):
        assert segment_of(leaves).flatten(leaves).tolist() == expected
