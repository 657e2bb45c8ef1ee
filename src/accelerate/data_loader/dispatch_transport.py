"""Batches from process 0 to the others: packed as bytes, sent over the transport or through shared memory.

A message is a header of four integers that every process gets, and a block of bytes for each. The block holds
the tensors of some rounds, one round after the other. The specs that describe them come first in the block,
and only when they have changed since the last message.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import process_home
from accelerate.data_loader.last_batch import Counts
from accelerate.devices import of_device
from accelerate.nested import TensorInformation, is_tensor_information, recursively_apply
from accelerate.ops import ALIGNMENT, Transport, cached_layout, views_of

LARGE = 256 * 1024  # bytes of a block for which two copies cost less than sockets
AHEAD = 16 * 1024 * 1024  # bytes that a receiver may not have copied yet when process 0 sends more to it
HEADER = 4  # integers in the header of a message
_PAGE = 2 * 1024 * 1024
_KEPT = 6  # unused private slots of one size that are kept
_SAME_SPECS, _NEW_SPECS, _FAILED = range(3)
_NUMBER = 8  # bytes: the length of the specs, before them

MessageHeader = tuple[int, ...]
Take = Callable[[int], Tensor | None]  # returns shared memory of this many bytes, where it is used


@dataclass(frozen=True)
class Round:
    """One step of all groups; `counts`: real samples of each part, None where all are equal and real."""

    parts: list[Any]
    is_last: bool
    counts: Counts | None = None
    state: Any = None


class Spec(NamedTuple):
    outline: Any  # with a `TensorInformation` for each tensor
    size: int  # bytes of its chunk
    counts: Counts | None


class PackedPart(NamedTuple):
    """A part, packed: its pickled `Spec`, which can be compared with the one before, and its chunk."""

    spec: bytes
    chunk: Tensor


class Failure(NamedTuple):
    """The reading process' exception, with its traceback as text."""

    error: bytes | None
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Make an exception one that every process can raise."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # of the pickle methods of an exception class; its text is sent instead
            return Failure(None, text)
        return Failure(packed, text)

    def raise_here(self) -> None:
        """Raise the same exception here, with the reading process' traceback as its cause."""
        cause = RuntimeError(f"the loader failed on process 0, which reads for all:\n{self.text}")
        if self.error is None:
            raise cause
        raise pickle.loads(self.error) from cause


def pack(complete: Round, group: int, take: Take = lambda size: None) -> PackedPart:
    """Pack the tensors of one group's part into bytes on the CPU; one contiguous tensor is not copied."""
    tensors: list[Tensor] = []

    def is_dense(leaf: Any) -> bool:  # sparse and quantised ones are pickled in the spec
        return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized

    def describe(tensor: Tensor) -> TensorInformation:
        tensors.append(tensor.detach().cpu())
        return TensorInformation(tensor.shape, tensor.dtype)

    outline = recursively_apply(describe, complete.parts[group], test_type=is_dense)
    layout = cached_layout(tuple((tensor.shape, tensor.dtype) for tensor in tensors))
    size = -(-layout.width // ALIGNMENT) * ALIGNMENT
    spec = Spec(outline, size, complete.counts)
    if size == layout.width and not any(tensor.is_inference() for tensor in tensors):
        return PackedPart(pickle.dumps(spec), layout.pack(tensors))
    chunk = take(size)
    if chunk is None:
        chunk = torch.empty(size, dtype=torch.uint8, device="cpu")
    layout.pack_into(tensors, chunk)
    return PackedPart(pickle.dumps(spec), chunk)


def unpack(spec: Spec, chunk: Tensor) -> Any:
    """Rebuild a part; its tensors use the chunk's memory."""
    facts: list[tuple[torch.Size, torch.dtype]] = []

    def take(info: TensorInformation) -> TensorInformation:
        facts.append((info.shape, info.dtype))
        return info

    recursively_apply(take, spec.outline, test_type=is_tensor_information)
    tensors = iter(views_of(chunk, tuple(facts)))
    return recursively_apply(lambda info: next(tensors), spec.outline, test_type=is_tensor_information)


class Arrival(NamedTuple):
    part: Any
    counts: Counts | None
    is_last: bool
    state: Any = None


class Packed(NamedTuple):
    round: Round
    parts: dict[int, PackedPart]  # for each group of another process
    size: int  # of the largest one


class Sender:
    """The sending end, on process 0."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._others = route.receivers
        self._sent_specs: dict[int, bytes] = {}

    def pack(self, complete: Round) -> Packed:
        """Pack a round; nothing is sent, any thread may do it."""
        parts = {group: pack(complete, group, self._route.take) for group in self._others}
        return Packed(complete, parts, max((len(part.chunk) for part in parts.values()), default=0))

    def send(self, rounds: list[Packed]) -> None:
        """Send rounds in one message; an empty list ends the pass."""
        if not self._others:
            return
        is_end = not rounds or rounds[-1].round.is_last
        specs = {group: [packed.parts[group].spec for packed in rounds] for group in self._others}
        is_new = any(spec != self._sent_specs.get(group) for group in specs for spec in specs[group])
        blocks = {}
        for group in self._others if rounds else ():
            chunks = [packed.parts[group].chunk for packed in rounds]
            if is_new:
                text = pickle.dumps(specs[group])
                chunks.insert(0, _padded(len(text).to_bytes(_NUMBER, "little") + text))
                self._sent_specs[group] = specs[group][-1]
            blocks[group] = chunks
        self._route.send((_NEW_SPECS if is_new else _SAME_SPECS, len(rounds), is_end), blocks)

    def fail(self, error: BaseException) -> None:
        if self._others:
            chunk = _padded(pickle.dumps(Failure.of(error)))
            self._route.send((_FAILED, 0, True), {group: [chunk] for group in self._others})


def receive(route: Route) -> Iterator[Arrival]:
    """Receive the batches of one pass, on the other processes."""
    specs: list[Spec] = []
    is_end = 0
    while not is_end:
        (kind, rounds, is_end), block = route.receive()
        if kind == _FAILED:
            pickle.loads(block.cpu().numpy().data).raise_here()
        start = 0
        if kind == _NEW_SPECS:
            end = _NUMBER + int.from_bytes(block[:_NUMBER].cpu().numpy().tobytes(), "little")
            specs = [pickle.loads(spec) for spec in pickle.loads(block[_NUMBER:end].cpu().numpy().data)]
            start = -(-end // ALIGNMENT) * ALIGNMENT
        else:
            specs = specs[-1:] * rounds
        for number, spec in enumerate(specs, 1):
            chunk = block[start : start + spec.size]
            # A chunk that shares its block is copied, so that keeping one part doesn't keep them all.
            part = unpack(spec, chunk if rounds == 1 else chunk.clone())
            yield Arrival(part, spec.counts, bool(is_end) and number == rounds)
            start += spec.size


def _padded(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text) + bytearray(-len(text) % ALIGNMENT), dtype=torch.uint8)


class Route:
    """Sends messages from process 0 to the other processes: a header for all, and a block of bytes for each.

    The caller owns what it gets: it is never in shared memory, but may be in private slots.

    Small blocks are sent over the transport. Large blocks on the CPU go through memory that all processes
    share, where they run on one machine: it is opened after the first of them. All processes make the same
    calls: process 0 `send`s, the others `receive`.
    """

    def __init__(self, transport: Transport, group_of: Sequence[int], device: torch.device) -> None:
        self.transport = transport
        self.device = device  # where blocks are when they are sent
        self.receivers = sorted(set(group_of[1:]))
        self._group_of = group_of  # the data-parallel group of each process, in rank order
        self._unused = torch.empty(0, dtype=torch.uint8, device=device)
        self._memory: SharedMemory | None = None
        self._may_share = of_device(device).is_host
        self._own = Slots()
        self._sent: list[Tensor] = []  # blocks in shared memory, which the others may not have read yet
        self._sending: list[Callable[[], object]] = []  # waits for each of their headers
        self._unread = 0  # bytes of these blocks for each receiver

    @property
    def is_sharing(self) -> bool:
        """Whether the memory that all processes share is open."""
        return self._memory is not None

    def take(self, size: int, is_own: bool = False) -> Tensor | None:
        """Process 0: return memory for bytes to be sent, or for its own part; None where none is shared."""
        if self._memory is None or size < LARGE:
            return None
        return self._own.take(size) if is_own else self._memory.take(size)

    def keep(self, part: Any) -> Any:
        """Process 0: copy the tensors of its own part that are in shared memory, for the caller to own."""
        memory = self._memory
        if memory is None:
            return part
        return recursively_apply(torch.clone, part, test_type=lambda leaf: memory.find(leaf) is not None)

    def send(self, header: MessageHeader, blocks: Mapping[int, Sequence[Tensor]]) -> None:
        """Process 0: send `HEADER` integers less one to all, and chunks to each of `receivers`."""
        size = max((sum(map(len, chunks)) for chunks in blocks.values()), default=0)
        memory = self._memory if size >= LARGE else None
        shared = [_in_memory(memory, blocks[group], size) for group in self.receivers] if memory else []
        starts = [memory.find(block) or 0 for block in shared] if memory else [0] * len(self.receivers)
        self._send_header(torch.tensor([*header, size, *starts]), may_wait=memory is None)
        if memory is not None:
            self._sent += shared
            self._unread += size
        if size and memory is None:
            self._send_by_transport(blocks, size)
            self._share_from_now_on(size)

    def receive(self) -> tuple[MessageHeader, Tensor]:
        """The other processes: take the header and the block of this process, which the caller owns."""
        sent = self._receive_header(torch.zeros(HEADER + len(self.receivers), dtype=torch.int64)).tolist()
        *header, size = sent[:HEADER]
        if size < LARGE or self._memory is None:
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
            if size and self.transport.size == 2:
                block = self.transport.broadcast(block, 0)
            elif size:
                block = self.transport.scatter(None, block, 0)
            self._share_from_now_on(size)
            return tuple(header), block
        self._unread += size
        index = self.receivers.index(self._group_of[self.transport.rank])
        return tuple(header), self._own.take(size).copy_(self._memory.view(sent[HEADER + index], size))

    def _send_header(self, header: Tensor, may_wait: bool) -> None:
        if self._memory is None or (may_wait and self._unread < AHEAD):
            self.transport.broadcast(header, 0)
        elif self._unread < AHEAD:
            self._sending.append(self.transport.start_broadcast(header, 0))
        else:
            for wait in self._sending:
                wait()
            # It returns when all processes have called it: they have copied the blocks before this message.
            self.transport.gather(header)
            self._sending.clear()
            self._sent.clear()
            self._unread = 0

    def _receive_header(self, header: Tensor) -> Tensor:
        if self._memory is None or self._unread < AHEAD:
            return self.transport.broadcast(header, 0)
        self._unread = 0
        return self.transport.gather(header)[: len(header)]

    def _share_from_now_on(self, size: int) -> None:
        if size >= LARGE and self._may_share:
            self._may_share = False
            self._memory = share_memory(self.transport)

    def _send_by_transport(self, blocks: Mapping[int, Sequence[Tensor]], size: int) -> None:
        joined = {}
        for group, chunks in blocks.items():
            filler = torch.empty(size - sum(map(len, chunks)), dtype=torch.uint8, device="cpu")
            whole = torch.cat([*chunks, filler]) if len(chunks) > 1 or len(filler) else chunks[0]
            joined[group] = whole.to(self.device)
        if self.transport.size == 2:  # for one receiver the same, without a block for process 0
            self.transport.broadcast(joined[self._group_of[1]], 0)
            return
        if len(self._unused) < size:  # for process 0, which keeps what it has read
            self._unused = torch.zeros(size, dtype=torch.uint8, device=self.device)
        own = self._unused[:size]
        self.transport.scatter([own, *(joined[group] for group in self._group_of[1:])], own, 0)


def _in_memory(memory: SharedMemory, chunks: Sequence[Tensor], size: int) -> Tensor:
    """Return chunks as one block in shared memory; a single chunk that is there is not copied."""
    if len(chunks) == 1 and len(chunks[0]) == size and memory.find(chunks[0]) is not None:
        return chunks[0]
    block = memory.take(size)
    torch.cat(list(chunks), out=block[: sum(map(len, chunks))])
    return block


class Slots:
    """Memory that is used again when no tensor uses it any more: fresh memory costs more than a copy.

    A slot is mapped for itself. Here it is private: a fork has a copy.
    """

    kept: int | None = _KEPT

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}  # by their size

    def take(self, size: int) -> Tensor:
        """Return bytes that no other tensor uses."""
        room = max(_PAGE, 1 << (size - 1).bit_length())  # pages that are not written take no memory
        free = self._free.setdefault(room, deque(maxlen=self.kept))
        try:
            slot = free.pop()
        except IndexError:
            slot = self._map(room)
        owner = memoryview(slot)  # exists as long as the memory of the tensor, which its views share
        finalize(owner, free.append, slot).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8, count=size)

    def _map(self, room: int) -> mmap.mmap:
        if sys.platform != "win32":  # which has no forks
            return mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:  # noqa: RET505 - types are checked on each system
            return mmap.mmap(-1, room)


class SharedMemory(Slots):
    """Slots in memory without a name, which is freed when the last process that has it open ends.

    Process 0 takes slots, and keeps what the others still read. They find a slot by its start in the file,
    which is closed with this object.
    """

    kept = None  # all: as many as are read ahead

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._size = 0  # bytes of all slots
        self._starts: dict[int, int] = {}  # by the address of the slot
        self._lock = threading.Lock()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        finalize(self, os.close, descriptor)

    def find(self, tensor: Any) -> int | None:
        """Return where the file has the memory of a tensor; None where that is no slot."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
        start = self._starts.get(address)
        return None if start is None else start + tensor.data_ptr() - address

    def view(self, start: int, size: int) -> Tensor:
        if start + size > len(self._bytes):
            self._bytes = torch.frombuffer(mmap.mmap(self._descriptor, 0), dtype=torch.uint8)
        return self._bytes[start : start + size]

    def _map(self, room: int) -> mmap.mmap:
        with self._lock:  # a thread that reads ahead takes slots too
            start, self._size = self._size, self._size + room
            if os.fstat(self._descriptor).st_size < self._size:
                os.ftruncate(self._descriptor, 2 * self._size)  # so that the others seldom map it again
            slot = mmap.mmap(self._descriptor, room, offset=start)
            self._starts[torch.frombuffer(slot, dtype=torch.uint8).data_ptr()] = start
            return slot


class StackInMemory:
    """torch's default collate function, which stacks large tensors in the memory of a route.

    Of each `take` batches, that of `group` is for this process; where that is wrong, it is copied once more.
    """

    def __init__(self, route: Route, group: int, take: int) -> None:
        self._route = route
        self._group = group if take > 1 else None
        self._places = cycle(range(take))
        functions = torch_private.collate.default_collate_fn_map
        self._functions = {**functions, Tensor: self._stack}

    def __call__(self, samples: Any) -> Any:
        self._is_own = next(self._places) == self._group
        return torch_private.collate.collate(samples, collate_fn_map=self._functions)

    def _stack(self, tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
        first, out = tensors[0], None
        if self._route.is_sharing and _is_like(first, first) and not torch.is_inference_mode_enabled():
            out = self._route.take(len(tensors) * first.nbytes, self._is_own)
        if out is None or not all(_is_like(tensor, first) for tensor in tensors):
            return torch_private.collate.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return torch.stack(list(tensors), out=out.view(first.dtype).view(len(tensors), *first.shape))


def _is_like(tensor: Tensor, first: Tensor) -> bool:
    """Whether torch.stack copies the bytes of this one behind those of the first."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    if not tensor.is_cpu or tensor.requires_grad:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.dtype == first.dtype and tensor.shape == first.shape and tensor.is_contiguous()


def share_memory(transport: Transport) -> SharedMemory | None:
    """Open memory that all processes share; called on all of them. None on all where one cannot have it:
    on another machine, in another container, on another system than Linux, or without the right to open
    it."""
    is_own = transport.rank == 0
    offer = transport.broadcast_object(_offer() if is_own else None, 0)
    descriptor: int | None = None
    if is_own and offer is not None:
        descriptor = offer[2]
    elif offer is not None and offer[0] == process_home():
        with suppress(OSError):  # other user, hidden processes: everything is sent over the transport
            descriptor = os.open(f"/proc/{offer[1]}/fd/{offer[2]}", os.O_RDWR)
    memory = None if descriptor is None else SharedMemory(descriptor)
    return memory if all(transport.gather_object(memory is not None)) else None


def _offer() -> tuple[str, int, int] | None:
    """Return where the other processes open a memory file of process 0: its machine, process, descriptor."""
    home = process_home()
    if home is None or not hasattr(os, "memfd_create"):
        return None
    return home, os.getpid(), os.memfd_create("accelerate-batches")
