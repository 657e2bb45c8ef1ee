"""Pools of private and shared memory for batches that rank 0 sends to other ranks of its node."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from accelerate.base import process_home
from accelerate.ops import Transport

_PAGE = 2 * 1024 * 1024
_KEPT = 6
"""Number of unused private slots of one size that are kept."""


class MemoryPool:
    """Pool of private memory that is used again when no tensor uses it.

    To map new memory takes longer than a copy.

    Each slot of the pool is a mapping of its own. A fork has a copy of it.
    """

    kept: int | None = _KEPT
    """Number of unused slots of one size that are kept; None for all."""

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}  # by their size

    def take(self, size: int) -> Tensor:
        """Returns a tensor of bytes that no other tensor uses."""
        room = max(_PAGE, 1 << (size - 1).bit_length())  # pages that are not written use no memory
        free = self._free.setdefault(room, deque(maxlen=self.kept))
        try:
            slot = free.pop()
        except IndexError:
            slot = self._map(room)
        owner = memoryview(slot)  # exists as long as the tensor and its views
        finalize(owner, free.append, slot).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8, count=size)

    def _map(self, room: int) -> mmap.mmap:
        if sys.platform != "win32":  # Windows has no forks
            return mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:  # noqa: RET505 - types are checked on each system
            return mmap.mmap(-1, room)


class SharedMemoryPool(MemoryPool):
    """Pool of shared memory without a name, which is freed when the last process that has it open ends.

    Rank 0 takes slots, and keeps those that other ranks still read. They find a slot by its start in the
    memory file, which is closed with this object.
    """

    kept = None

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._size = 0  # of all slots, in bytes
        self._starts: dict[int, int] = {}  # start in the file by the address of the slot
        self._lock = threading.Lock()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        finalize(self, os.close, descriptor)

    def find(self, tensor: Any) -> int | None:
        """Returns the start of the memory of a tensor in the file, or None if the tensor is not in a slot."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
        start = self._starts.get(address)
        return None if start is None else start + tensor.data_ptr() - address

    def view(self, start: int, size: int) -> Tensor:
        """Returns a view of bytes of the file."""
        if start + size > len(self._bytes):
            self._bytes = torch.frombuffer(mmap.mmap(self._descriptor, 0), dtype=torch.uint8)
        return self._bytes[start : start + size]

    def _map(self, room: int) -> mmap.mmap:
        with self._lock:  # a thread that reads ahead takes slots, too
            start, self._size = self._size, self._size + room
            if os.fstat(self._descriptor).st_size < self._size:
                os.ftruncate(self._descriptor, 2 * self._size)  # so that the other ranks rarely map it again
            slot = mmap.mmap(self._descriptor, room, offset=start)
            self._starts[torch.frombuffer(slot, dtype=torch.uint8).data_ptr()] = start
            return slot


def share_memory(transport: Transport) -> SharedMemoryPool | None:
    """Opens memory that all ranks share.

    Called on all ranks.

    Returns:
        The memory; None on all ranks if one of them cannot open it, because it is on another node, in another
        container, on another system than Linux, or lacks the permission.
    """
    is_own = transport.rank == 0
    offer = transport.broadcast_object(_offer() if is_own else None, 0)
    descriptor: int | None = None
    if is_own and offer is not None:
        descriptor = offer[2]
    elif offer is not None and offer[0] == process_home():
        with suppress(OSError):  # another user, hidden processes: all blocks are sent over the transport
            descriptor = os.open(f"/proc/{offer[1]}/fd/{offer[2]}", os.O_RDWR)
    memory = None if descriptor is None else SharedMemoryPool(descriptor)
    return memory if all(transport.gather_object(memory is not None)) else None


def _offer() -> tuple[str, int, int] | None:
    """Returns the node, process and descriptor by which other processes open a new memory file of rank 0."""
    home = process_home()
    if home is None or not hasattr(os, "memfd_create"):
        return None
    return home, os.getpid(), os.memfd_create("accelerate-batches")
