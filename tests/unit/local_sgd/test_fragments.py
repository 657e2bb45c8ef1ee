"""The division of parameters into fragments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.local_sgd.fragments import build_fragments, divide


@pytest.mark.parametrize(
    ("sizes", "num_parts", "parts"),
    [
        ([1, 1, 1, 1], 2, [range(2), range(2, 4)]),
        ([1, 1, 1, 5], 2, [range(3), range(3, 4)]),
        ([9, 1, 1], 3, [range(1), range(1, 2), range(2, 3)]),
        ([1, 1, 9], 3, [range(1), range(1, 2), range(2, 3)]),
        ([2, 2, 2], 1, [range(3)]),
        ([0, 0], 2, [range(1), range(1, 2)]),
    ],
)
def test_parts_are_adjacent_and_none_is_empty(sizes: list[int], num_parts: int, parts: list[range]) -> None:
    assert divide(sizes, num_parts) == parts


def test_exchanges_are_spread_over_the_interval_in_one_buffer_for_each_dtype() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    parameters = [
        nn.Parameter(torch.full((2,), float(index), dtype=dtype)) for index, dtype in enumerate(dtypes)
    ]
    first, second = build_fragments(parameters, 2, 7, None)
    assert (first.offset, second.offset) == (3, 7)
    assert [bucket.flat.dtype for bucket in first.buckets] == [torch.float32]
    assert first.buckets[0].flat.tolist() == [0, 0, 1, 1]
    assert [bucket.flat.tolist() for bucket in second.buckets] == [[2, 2], [3, 3]]
    assert [bucket.flat.dtype for bucket in second.buckets] == [torch.float64, torch.float32]


def test_mixing_keeps_a_part_of_the_weights_in_float32() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
    (bucket,) = build_fragments([parameter], 1, 1, None)[0].buckets
    bucket.views[0].data.add_(2.0)
    assert bucket.difference().tolist() == [2.0, 2.0]
    bucket.copy_to_model(mixing=0.25)
    assert parameter.tolist() == [2.5, 4.5]
    bucket.copy_to_model()
    assert parameter.tolist() == [3.0, 5.0]
