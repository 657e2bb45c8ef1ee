"""Blocks that travel through shared memory, and when they don't."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from accelerate.data_loader import Route, SharedMemory, dispatch_transport, share_memory
from accelerate.ops import Transport

PAGE = 2 * 1024 * 1024


def two_views(places: int = 2) -> tuple[SharedMemory, SharedMemory]:
    mine = os.memfd_create("test")
    return SharedMemory(mine, places), SharedMemory(os.dup(mine), places)


class Meeting(Transport):
    """The wire of one of two processes, played by a script: what process 0 offers, and what all answer."""

    size, rank = 2, 1

    def __init__(self, offer: Any, others_have_it: bool = True) -> None:
        self.offer, self.others_have_it = offer, others_have_it

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        return self.offer

    def gather_object(self, obj: Any) -> list[Any]:
        return [self.others_have_it, obj]


def test_both_ends_find_the_same_blocks() -> None:
    writer, reader = two_views()
    for turn, size in enumerate((3, PAGE, PAGE + 1, 5, 4 * PAGE)):
        writer.turn(size)
        reader.turn(size)
        for place in range(2):
            writer.block(place, size).fill_(10 * turn + place)
        assert [set(reader.block(place, size).tolist()[-3:]) for place in range(2)] == [
            {10 * turn},
            {10 * turn + 1},
        ]


def test_the_block_before_the_last_one_stays_readable() -> None:
    writer, _ = two_views(places=1)
    kept = []
    for turn, size in enumerate((8, 8, 2 * PAGE, 8 * PAGE)):
        writer.turn(size)
        writer.block(0, size).fill_(turn)
        kept.append(writer.block(0, size)[:8])
        assert [block[0].item() for block in kept[-2:]] == list(range(turn + 1))[-2:]


def test_the_file_is_closed_with_the_memory() -> None:
    descriptor = os.memfd_create("test")
    memory = SharedMemory(descriptor, 1)
    memory.turn(10)
    block = memory.block(0, 10).fill_(7)
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert block.sum() == 70  # what was handed out stays


def test_an_offer_is_taken_by_its_own_machine_only() -> None:
    offer = dispatch_transport._offer()
    assert offer is not None
    assert share_memory(Meeting(offer), 1) is not None
    assert share_memory(Meeting(("another kernel", *offer[1:])), 1) is None
    os.close(offer[2])
    assert share_memory(Meeting(offer), 1) is None  # cannot be opened (any more)
    assert share_memory(Meeting(None), 1) is None


def test_memory_that_one_process_lacks_is_used_by_none() -> None:
    offer = dispatch_transport._offer()
    assert offer is not None
    assert share_memory(Meeting(offer, others_have_it=False), 1) is None
    os.close(offer[2])


def test_a_system_without_files_in_memory_makes_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert dispatch_transport._offer() is None


def test_blocks_of_devices_never_share_memory_of_the_host() -> None:
    route = Route(Meeting(None), range(2), torch.device("meta"))
    route._share_from_now_on(dispatch_transport.LARGE)  # Meeting(None) would answer; nobody asks
    assert route._memory is None
    assert not route._may_share
