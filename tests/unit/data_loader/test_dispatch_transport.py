"""Blocks that are sent through shared memory, and blocks that are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from accelerate.data_loader import (
    BatchChannel,
    MemoryPool,
    SharedMemoryPool,
    dispatch_transport,
    memory_pools,
    share_memory,
)
from accelerate.ops import Transport

PAGE = 2 * 1024 * 1024


def two_views() -> tuple[SharedMemoryPool, SharedMemoryPool]:
    mine = os.memfd_create("test")
    return SharedMemoryPool(mine), SharedMemoryPool(os.dup(mine))


class FakeTransport(Transport):
    """The transport of rank 1 of 2. Rank 0 broadcasts `offer` and answers `others_have_it`."""

    size, rank = 2, 1

    def __init__(self, offer: Any, others_have_it: bool = True) -> None:
        self.offer, self.others_have_it = offer, others_have_it

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        return self.offer

    def gather_object(self, obj: Any) -> list[Any]:
        return [self.others_have_it, obj]


def test_writer_and_reader_find_the_same_slots() -> None:
    writer, reader = two_views()
    kept = [writer.take(size).fill_(number) for number, size in enumerate((3, PAGE, PAGE + 1, 5, 4 * PAGE))]
    for number, slot in enumerate(kept):
        for part in (slot, slot[2:], slot[1:3]):
            start = writer.find(part)
            assert start is not None
            assert reader.view(start, len(part)).tolist() == [number] * len(part)


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.eye(2).to_sparse(), "text", None], ids=str)
def test_other_memory_has_no_slot(tensor: Any) -> None:
    writer, _ = two_views()
    writer.take(3)
    assert writer.find(tensor) is None


def private() -> MemoryPool:
    return MemoryPool()


def shared() -> MemoryPool:
    return two_views()[0]


@pytest.mark.parametrize("make", [private, shared])
def test_a_slot_is_used_again_when_nothing_uses_it(make: Callable[[], MemoryPool]) -> None:
    slots = make()
    first = slots.take(PAGE)
    address = first.data_ptr()
    numbers = first.view(torch.int64)[4:6].numpy()
    del first
    assert slots.take(PAGE).data_ptr() != address  # the array is a view of it
    del numbers
    assert {slots.take(PAGE - 7).data_ptr(), slots.take(2 * PAGE).data_ptr()} & {address}


@pytest.mark.parametrize("make", [private, shared])
@given(steps=st.lists(st.tuples(st.sampled_from(["take", "keep a view", "drop"]), st.integers(0, 3 * PAGE))))
@settings(max_examples=50)
def test_a_slot_in_use_is_not_overwritten(
    make: Callable[[], MemoryPool], steps: list[tuple[str, int]]
) -> None:
    slots = make()
    kept: dict[int, torch.Tensor] = {}
    for number, (step, where) in enumerate(steps):
        if step == "take":
            kept[number] = slots.take(where + 1)[-8:].fill_(number % 251)
        elif kept:
            key = [*kept][where % len(kept)]
            tensor = kept.pop(key)
            if step == "keep a view":
                kept[key] = tensor[-1:].view(1, 1)
            del tensor
    assert all((tensor == key % 251).all() for key, tensor in kept.items())
    addresses = [tensor.untyped_storage().data_ptr() for tensor in kept.values()]
    assert len({*addresses}) == len(addresses)


def test_few_private_slots_are_kept() -> None:
    slots = MemoryPool()
    taken = [slots.take(PAGE) for _ in range(20)]
    del taken
    assert [len(free) for free in slots._free.values()] == [memory_pools._KEPT]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_a_copy_of_a_private_slot() -> None:
    slots = MemoryPool()
    mine = slots.take(4).fill_(1)
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    child = os.fork()
    if not child:
        os.read(from_parent, 1)
        os.write(to_parent, bytes(mine.tolist()))
        os._exit(0)
    mine.fill_(2)
    os.write(to_child, b"x")
    assert os.read(from_child, 4) == bytes([1] * 4)
    os.waitpid(child, 0)
    for descriptor in (from_child, to_parent, from_parent, to_child):
        os.close(descriptor)


def test_the_file_is_closed_with_the_memory() -> None:
    descriptor = os.memfd_create("test")
    memory = SharedMemoryPool(descriptor)
    block = memory.take(10).fill_(7)
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert block.sum() == 70  # what was handed out stays


def test_an_offer_of_shared_memory_is_accepted_on_its_machine_only() -> None:
    offer = memory_pools._offer()
    assert offer is not None
    assert share_memory(FakeTransport(offer)) is not None
    assert share_memory(FakeTransport(("another kernel", *offer[1:]))) is None
    os.close(offer[2])
    assert share_memory(FakeTransport(offer)) is None  # cannot be opened (any more)
    assert share_memory(FakeTransport(None)) is None


def test_shared_memory_is_used_only_if_all_ranks_have_it() -> None:
    offer = memory_pools._offer()
    assert offer is not None
    assert share_memory(FakeTransport(offer, others_have_it=False)) is None
    os.close(offer[2])


def test_a_system_without_files_in_memory_makes_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert memory_pools._offer() is None


def test_blocks_of_devices_never_share_memory_of_the_host() -> None:
    channel = BatchChannel(FakeTransport(None), range(2), torch.device("meta"))
    channel._share_from_now_on(dispatch_transport.LARGE)  # FakeTransport(None) would answer; no rank asks
    assert channel._memory is None
    assert not channel._may_share
