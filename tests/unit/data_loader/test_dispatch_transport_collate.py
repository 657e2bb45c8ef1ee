"""Samples collated in memory that is sent, as torch's default collate function collates them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from accelerate.data_loader import BatchChannel, SharedMemoryCollate, SharedMemoryPool
from accelerate.ops import Transport

SIZE = 70_000  # four-byte elements of one sample: more than 256 KiB


class Alone(Transport):
    """A transport that is not used."""

    size, rank = 2, 0


class Pair(NamedTuple):
    x: Any
    y: Any


def make_channel() -> tuple[BatchChannel, SharedMemoryPool]:
    channel = BatchChannel(Alone(), range(2), torch.device("cpu"))
    channel._memory = SharedMemoryPool(os.memfd_create("test"))
    return channel, channel._memory


def large(**settings: Any) -> torch.Tensor:
    return torch.arange(SIZE, **settings).view(7, -1)


def leaves_of(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return leaves_of(list(batch.values()))
    if isinstance(batch, (list, tuple)):
        return [leaf for item in batch for leaf in leaves_of(item)]
    return [batch]


IN_MEMORY = {
    "floats": [torch.rand(SIZE), torch.rand(SIZE)],
    "bytes": [large().to(torch.uint8).repeat(1, 4), torch.zeros(7, 40_000, dtype=torch.uint8)],
    "bool": [torch.ones(4 * SIZE, dtype=torch.bool)] * 3,
    "bfloat16": [large().bfloat16(), large().bfloat16()],
    "one channel": [torch.rand(1, 300, 300), torch.rand(1, 300, 300)],
    "dictionary": [{"x": large(), "y": 1, "z": "a"}, {"x": large() + 1, "y": 2, "z": "b"}],
    "named": [Pair(large(), 0.5), Pair(large() * 2, 1.5)],
    "numpy": [(np.arange(SIZE), 1), (np.arange(SIZE) * 2, 2)],
}
NOT_IN_MEMORY = {
    "small": [torch.rand(9), torch.rand(9)],
    "transposed": [large().T, large().T],
    "channels last": [torch.rand(1, 3, 200, 200).to(memory_format=torch.channels_last)[0]] * 2,
    "other dtype": [large(), large().float()],
    "conjugate": [torch.view_as_complex(torch.rand(SIZE, 2)).conj()] * 2,
    "gradients": [torch.rand(SIZE, requires_grad=True), torch.rand(SIZE)],
    "parameter": [torch.nn.Parameter(torch.rand(SIZE)).detach().as_subclass(torch.nn.Buffer)] * 2,
    "numbers": [1, 2],
}


@pytest.mark.parametrize(
    "samples", [*IN_MEMORY.values(), *NOT_IN_MEMORY.values()], ids=[*IN_MEMORY, *NOT_IN_MEMORY]
)
@pytest.mark.parametrize("group", [0, 1])
def test_a_batch_is_the_same(samples: Sequence[Any], group: int) -> None:
    channel, memory = make_channel()
    expected = default_collate(list(samples))
    batch = SharedMemoryCollate(channel, group, 2)(list(samples))
    in_shared, in_slot = [], []
    for leaf, other in zip(leaves_of(batch), leaves_of(expected), strict=True):
        assert type(leaf) is type(other)
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, other)
            facts = [(t.dtype, t.shape, t.stride(), t.requires_grad, t.is_inference()) for t in (leaf, other)]
            assert facts[0] == facts[1]
            in_shared.append(memory.find(leaf) is not None)
            in_slot.append(not leaf.untyped_storage().resizable())
    is_in_memory = any(samples is known for known in IN_MEMORY.values())
    assert any(in_slot) == is_in_memory
    assert any(in_shared) == (is_in_memory and group == 1)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.rand(SIZE), torch.rand(SIZE + 1)],
        [torch.eye(300).to_sparse()] * 2,
        [torch.nested.nested_tensor([torch.rand(SIZE), torch.rand(2)], layout=torch.jagged)] * 2,
        [object(), object()],
    ],
    ids=["shapes", "sparse", "nested", "objects"],
)
def test_a_batch_that_cannot_be_made_is_the_same_error(samples: Sequence[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as expected:
        default_collate(list(samples))
    with pytest.raises(expected.type) as caught:
        SharedMemoryCollate(make_channel()[0], 0, 2)(list(samples))
    assert str(caught.value) == str(expected.value)


def test_an_inference_batch_is_one() -> None:
    channel, memory = make_channel()
    with torch.inference_mode():
        batch = SharedMemoryCollate(channel, 1, 2)([torch.rand(SIZE)] * 2)
    assert batch.is_inference()
    assert memory.find(batch) is None


def test_nothing_is_shared_before_the_memory_is_open() -> None:
    channel, _ = make_channel()
    channel._memory = None
    assert channel.take(10**6) is None
    assert SharedMemoryCollate(channel, 0, 2)([torch.rand(SIZE)] * 2).shape == (2, SIZE)


def test_each_round_has_one_batch_in_private_memory() -> None:
    channel, memory = make_channel()
    collate = SharedMemoryCollate(channel, 1, 3)
    batches = [collate([torch.rand(SIZE)] * 2) for _ in range(6)]
    assert [memory.find(batch) is None for batch in batches] == [False, True, False] * 2


def test_a_sliced_batch_is_shared_and_the_part_of_this_rank_is_a_copy() -> None:
    channel, memory = make_channel()
    batch = SharedMemoryCollate(channel, 0, 1)([{"x": torch.rand(SIZE), "y": 1}] * 4)
    assert memory.find(batch["x"]) is not None
    part = channel.keep({"x": batch["x"][:2], "y": batch["y"]})
    assert memory.find(part["x"]) is None
    assert torch.equal(part["x"], batch["x"][:2])
    assert part["y"] is batch["y"]
