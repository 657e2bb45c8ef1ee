"""Blocks of bytes from process 0 to the others: over the wire or, on one machine, through shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from accelerate.base import process_home
from accelerate.devices import of_device
from accelerate.ops import Transport

LARGE = 256 * 1024
"""Bytes of a block for which two copies cost less than the way through sockets."""
_SLOTS = 2
_PAGE = 2 * 1024 * 1024


HEAD = 4
"""Integers at the head of a message."""
Head = tuple[int, ...]


class Route:
    """Brings messages from process 0 to the other processes: a head for all, and a block of bytes for each.

    Small blocks go over the wire. Large ones that stay on the CPU go through memory that all processes share,
    where they run on one machine: it is asked for behind the first of them.

    All processes make the same calls: process 0 `send`s, the others `receive`.

    Args:
        transport: The wire between all processes.
        group_of: The data-parallel group of each process, in rank order.
        device: Where blocks are while they travel.
    """

    def __init__(self, transport: Transport, group_of: Sequence[int], device: torch.device) -> None:
        self.transport = transport
        self.device = device
        self.receivers = sorted(set(group_of[1:]))
        self._group_of = group_of
        self._unused = torch.empty(0, dtype=torch.uint8, device=device)
        self._memory: SharedMemory | None = None
        self._may_share = of_device(device).is_host

    def send(self, head: Head, blocks: Mapping[int, Sequence[Tensor]]) -> None:
        """Process 0: send a message.

        Args:
            head: `HEAD` integers less one.
            blocks: For each of `receivers` its block, in one or several chunks on the CPU; they travel as if
                all were as long as the longest.
        """
        size = max((sum(map(len, chunks)) for chunks in blocks.values()), default=0)
        memory = self._memory if size >= LARGE else None
        if memory is not None:
            memory.turn(size)
            for place, group in enumerate(self.receivers):
                _fill(memory.block(place, size), blocks[group])
        self._tell(torch.tensor([*head, size]))
        if size and memory is None:
            self._send_by_wire(blocks, size)
            self._share_from_now_on(size)

    def receive(self) -> tuple[Head, Tensor]:
        """The other processes: take a message.

        Returns:
            The head, and the block of this process, which is the caller's own.
        """
        *head, size = self._tell(torch.zeros(HEAD, dtype=torch.int64)).tolist()
        if size < LARGE or self._memory is None:
            block = self._receive_by_wire(size)
            self._share_from_now_on(size)
            return tuple(head), block
        self._memory.turn(size)
        place = self.receivers.index(self._group_of[self.transport.rank])
        return tuple(head), self._memory.block(place, size).clone()

    def _tell(self, head: Tensor) -> Tensor:
        """Give process 0's head to all.

        With shared memory it returns only when all processes have come here: the others are done with the
        block before the last one, so its slot may be filled again.
        """
        if self._memory is None:
            return self.transport.broadcast(head, 0)
        return self.transport.gather(head)[:HEAD]

    def _share_from_now_on(self, size: int) -> None:
        if size >= LARGE and self._may_share:
            self._may_share = False
            self._memory = share_memory(self.transport, len(self.receivers))

    def _send_by_wire(self, blocks: Mapping[int, Sequence[Tensor]], size: int) -> None:
        joined = {group: _join(chunks, size).to(self.device) for group, chunks in blocks.items()}
        if self.transport.size == 2:  # for one receiver: the same, without a block of one's own
            self.transport.broadcast(joined[self._group_of[1]], 0)
            return
        own = self._unused_block(size)  # process 0 keeps what it has read
        self.transport.scatter([own, *(joined[group] for group in self._group_of[1:])], own, 0)

    def _receive_by_wire(self, size: int) -> Tensor:
        block = torch.empty(size, dtype=torch.uint8, device=self.device)
        if not size:
            return block
        if self.transport.size == 2:
            return self.transport.broadcast(block, 0)
        return self.transport.scatter(None, block, 0)

    def _unused_block(self, size: int) -> Tensor:
        if len(self._unused) < size:
            self._unused = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._unused[:size]


class SharedMemory:
    """Blocks in memory without a name, which goes when the last process that has it open ends.

    There are two slots of blocks, so that one can be read while the other is filled. Processes that take
    turns with the same sizes find the same blocks.

    Args:
        descriptor: An open file in memory; closed with this object.
        places: How many blocks lie side by side in a slot.
    """

    def __init__(self, descriptor: int, places: int) -> None:
        self._descriptor = descriptor
        self._places = places
        self._room = self._start = self._slot = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        finalize(self, os.close, descriptor)

    def turn(self, size: int) -> None:
        """Go over to the other slot; where blocks of `size` bytes don't fit, to two new ones behind it."""
        self._slot = (self._slot + 1) % _SLOTS
        if size <= self._room:
            return
        self._start = len(self._bytes)
        self._room = max(2 * self._room, -(-size // _PAGE) * _PAGE)
        end = self._start + _SLOTS * self._places * self._room
        if os.fstat(self._descriptor).st_size < end:  # the writer comes first
            os.ftruncate(self._descriptor, end)
        self._bytes = torch.frombuffer(mmap.mmap(self._descriptor, end), dtype=torch.uint8)

    def block(self, place: int, size: int) -> Tensor:
        """The block of `size` bytes at one place of the slot."""
        start = self._start + (self._slot * self._places + place) * self._room
        return self._bytes[start : start + size]


class _Offer(NamedTuple):
    """Where the file in memory of process 0 is found."""

    home: str
    process: int
    descriptor: int


def share_memory(transport: Transport, places: int) -> SharedMemory | None:
    """Open memory that all processes share; called on all of them.

    Args:
        transport: The wire between them.
        places: How many blocks lie in it side by side.

    Returns:
        The memory; None on every process when one of them cannot have it: another machine or container,
        another system than Linux, no right to open what belongs to process 0.
    """
    offer = transport.broadcast_object(_offer() if transport.rank == 0 else None, 0)
    descriptor = _accept(offer, transport.rank == 0)
    memory = None if descriptor is None else SharedMemory(descriptor, places)
    return memory if all(transport.gather_object(memory is not None)) else None


def _offer() -> _Offer | None:
    home = process_home()
    if home is None or not hasattr(os, "memfd_create"):
        return None
    return _Offer(home, os.getpid(), os.memfd_create("accelerate-batches"))


def _accept(offer: _Offer | None, is_own: bool) -> int | None:
    if offer is None or is_own:
        return None if offer is None else offer.descriptor
    if offer.home != process_home():
        return None
    try:
        return os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # other user, hidden processes: the wire carries everything
        return None


def _fill(block: Tensor, chunks: Sequence[Tensor]) -> None:
    start = 0
    for chunk in chunks:
        block[start : start + len(chunk)].copy_(chunk)
        start += len(chunk)


def _join(chunks: Sequence[Tensor], size: int) -> Tensor:
    missing = size - sum(map(len, chunks))
    if missing:
        chunks = [*chunks, torch.empty(missing, dtype=torch.uint8, device="cpu")]
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))
