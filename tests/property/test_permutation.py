"""For all sizes: an order that is computed has each index once."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from accelerate.data_loader import ConstantMemorySampler, IndexPermutation

SETTINGS = settings(max_examples=300)
LENGTHS = st.integers(1, 10**5)
SEEDS = st.integers(-(2**63), 2**64 - 1)


@SETTINGS
@given(LENGTHS, SEEDS)
def test_a_permutation_has_each_index_once(length: int, seed: int) -> None:
    order = IndexPermutation(length, seed)(torch.arange(length))
    assert torch.equal(order.sort().values, torch.arange(length))


@SETTINGS
@given(LENGTHS, SEEDS, st.data())
def test_an_epoch_can_start_at_any_position(length: int, seed: int, data: st.DataObject) -> None:
    sampler = ConstantMemorySampler(range(length), data_seed=seed)
    position = data.draw(st.integers(0, length))
    expected = IndexPermutation(length, seed)(torch.arange(position, length)).tolist()
    assert list(sampler.iter_from(position)) == expected


@SETTINGS
@given(st.integers(10**5, 2**62), SEEDS, st.data())
def test_positions_of_huge_orders_have_distinct_indices(length: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1000))
    indices = IndexPermutation(length, seed)(torch.arange(start, start + 1000))
    assert len(set(indices.tolist())) == 1000
    assert 0 <= int(indices.min()) <= int(indices.max()) < length
