"""Batches from process 0 to the others: packed as bytes, sent over the transport or through shared memory.

A message is a header of four integers that every process gets, and a block of bytes for each. The block holds
the tensors of some rounds, one round after the other. The specs that describe them come first in the block,
and only when they have changed since the last message.
"""

from __future__ import annotations

import mmap
import os
import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from accelerate.base import process_home
from accelerate.data_loader.last_batch import Counts
from accelerate.devices import of_device
from accelerate.nested import TensorInformation, is_tensor_information, recursively_apply
from accelerate.ops import ALIGNMENT, Transport, lay_out_once, views_of

LARGE = 256 * 1024  # bytes of a block for which two copies cost less than sockets
HEADER = 4  # integers in the header of a message
_SLOTS = 2
_PAGE = 2 * 1024 * 1024
_SAME_SPECS, _NEW_SPECS, _FAILED = range(3)
_NUMBER = 8  # bytes: the length of the specs, before them

MessageHeader = tuple[int, ...]


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
    is_last: bool


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


def pack(complete: Round, group: int) -> PackedPart:
    """Pack the tensors of one group's part into bytes on the CPU; one contiguous tensor is not copied."""
    tensors: list[Tensor] = []

    def is_dense(leaf: Any) -> bool:  # sparse and quantised ones are pickled in the spec
        return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized

    def take(tensor: Tensor) -> TensorInformation:
        tensors.append(tensor.detach().cpu())
        return TensorInformation(tensor.shape, tensor.dtype)

    outline = recursively_apply(take, complete.parts[group], test_type=is_dense)
    layout = lay_out_once(tuple((tensor.shape, tensor.dtype) for tensor in tensors))
    size = -(-layout.width // ALIGNMENT) * ALIGNMENT
    spec = Spec(outline, size, complete.counts, complete.is_last)
    if size == layout.width and not any(tensor.is_inference() for tensor in tensors):
        return PackedPart(pickle.dumps(spec), layout.pack(tensors))
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
        parts = {group: pack(complete, group) for group in self._others}
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
        for spec in specs:
            chunk = block[start : start + spec.size]
            # A chunk that shares its block is copied, so that keeping one part doesn't keep them all.
            part = unpack(spec, chunk if rounds == 1 else chunk.clone())
            yield Arrival(part, spec.counts, spec.is_last)
            start += spec.size


def _padded(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text) + bytearray(-len(text) % ALIGNMENT), dtype=torch.uint8)


class Route:
    """Sends messages from process 0 to the other processes: a header for all, and a block of bytes for each.

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

    def send(self, header: MessageHeader, blocks: Mapping[int, Sequence[Tensor]]) -> None:
        """Process 0: send `HEADER` integers less one to all, and chunks to each of `receivers`."""
        size = max((sum(map(len, chunks)) for chunks in blocks.values()), default=0)
        memory = self._memory if size >= LARGE else None
        if memory is not None:
            memory.turn(size)
            for index, group in enumerate(self.receivers):
                used = sum(map(len, blocks[group]))
                torch.cat(list(blocks[group]), out=memory.block(index, used))
        self._broadcast_header(torch.tensor([*header, size]))
        if size and memory is None:
            self._send_by_transport(blocks, size)
            self._share_from_now_on(size)

    def receive(self) -> tuple[MessageHeader, Tensor]:
        """The other processes: take the header and the block of this process, which the caller owns."""
        *header, size = self._broadcast_header(torch.zeros(HEADER, dtype=torch.int64)).tolist()
        if size < LARGE or self._memory is None:
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
            if size and self.transport.size == 2:
                block = self.transport.broadcast(block, 0)
            elif size:
                block = self.transport.scatter(None, block, 0)
            self._share_from_now_on(size)
            return tuple(header), block
        self._memory.turn(size)
        index = self.receivers.index(self._group_of[self.transport.rank])
        return tuple(header), self._memory.block(index, size).clone()

    def _broadcast_header(self, header: Tensor) -> Tensor:
        if self._memory is None:
            return self.transport.broadcast(header, 0)
        # It returns only when all processes have called it: the others are done with the block before the
        # last one, so its slot may be filled again.
        return self.transport.gather(header)[:HEADER]

    def _share_from_now_on(self, size: int) -> None:
        if size >= LARGE and self._may_share:
            self._may_share = False
            self._memory = share_memory(self.transport, len(self.receivers))

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


class SharedMemory:
    """Blocks in memory without a name, which is freed when the last process that has it open ends.

    There are two slots of blocks, so that one can be read while the other is filled. Processes that take
    turns with the same sizes find the same blocks. The open file is closed with this object.
    """

    def __init__(self, descriptor: int, num_blocks: int) -> None:
        self._descriptor = descriptor
        self._num_blocks = num_blocks
        self._room = self._start = self._slot = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        finalize(self, os.close, descriptor)

    def turn(self, size: int) -> None:
        """Switch to the other slot; where blocks of `size` bytes don't fit, to two new ones behind it."""
        self._slot = (self._slot + 1) % _SLOTS
        if size <= self._room:
            return
        self._start = len(self._bytes)
        self._room = max(2 * self._room, -(-size // _PAGE) * _PAGE)
        end = self._start + _SLOTS * self._num_blocks * self._room
        if os.fstat(self._descriptor).st_size < end:  # the writer comes first
            os.ftruncate(self._descriptor, end)
        self._bytes = torch.frombuffer(mmap.mmap(self._descriptor, end), dtype=torch.uint8)

    def block(self, index: int, size: int) -> Tensor:
        start = self._start + (self._slot * self._num_blocks + index) * self._room
        return self._bytes[start : start + size]


def share_memory(transport: Transport, num_blocks: int) -> SharedMemory | None:
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
    memory = None if descriptor is None else SharedMemory(descriptor, num_blocks)
    return memory if all(transport.gather_object(memory is not None)) else None


def _offer() -> tuple[str, int, int] | None:
    """Return where the other processes open a memory file of process 0: its machine, process, descriptor."""
    home = process_home()
    if home is None or not hasattr(os, "memfd_create"):
        return None
    return home, os.getpid(), os.memfd_create("accelerate-batches")
