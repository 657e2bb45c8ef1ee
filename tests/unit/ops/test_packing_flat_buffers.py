"""Segments of flat buffers are read as they were written; test_packing.py tests all structures."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.ops import joined_shape, plan_for, take_apart


def test_joined_shapes() -> None:
    assert joined_shape(torch.Size([2, 5]), 3) == (6, 5)
    assert joined_shape(torch.Size([]), 3) == (3,)


def test_results_do_not_track_each_other() -> None:
    parts = take_apart([torch.ones(2), torch.ones(2)])
    segment = plan_for("op", parts, size=2, room=99).whole.segments[0]  # type: ignore[union-attr]
    results: list[Any] = [None, None]
    segment.split(segment.flatten(parts.leaves), results)
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * results[0]).sum()
    results[1].add_(1)
    loss.backward()
    assert results[0].tolist() == [1.0, 1.0]


def test_leaves_of_another_memory_format_are_read_in_order() -> None:
    image = torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)
    segment = plan_for("op", take_apart([image, image]), size=2, room=999).whole.segments[0]  # type: ignore[union-attr]
    assert segment.flatten([image, image]).tolist() == [*range(16), *range(16)]


def test_conjugate_leaves_are_overwritten() -> None:
    leaf = torch.zeros(2, dtype=torch.complex64).conj()
    segment = plan_for("op", take_apart([leaf]), size=2, room=99).whole.segments[0]  # type: ignore[union-attr]
    segment.overwrite(torch.tensor([1j, 2]), [leaf])
    assert leaf.tolist() == [1j, 2]


def test_conjugate_and_negative_views_are_written_out() -> None:
    number = torch.tensor([1 + 2j])
    parts = take_apart([number.conj()])
    assert plan_for("op", parts, size=2, room=99).whole.segments[0].flatten(parts.leaves).tolist() == [1 - 2j]  # type: ignore[union-attr]
    parts = take_apart([number.conj(), number.conj()])
    assert (
        plan_for("op", parts, size=2, room=99).whole.segments[0].flatten(parts.leaves).tolist()
        == [1 - 2j] * 2
    )  # type: ignore[union-attr]
    parts = take_apart(number.conj().imag)
    assert plan_for("op", parts, size=2, room=99).whole.segments[0].flatten(parts.leaves).tolist() == [-2.0]  # type: ignore[union-attr]
