"""Segments of flat buffers are read as they were written; test_packing.py tests all structures."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.ops.packing import flatten_structure, joined_shape, plan_transfer


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
