"""Sends batches from rank 0 to the other ranks, packed as bytes, over the transport or through shared memory.

`DataLoaderDispatcher` uses a `BatchSender` on rank 0, and `receive_batches` on the other ranks. A message is
a header of four integers that every rank gets, and a block of bytes for each rank. The block holds the
tensors of some global batches, one after the other. The specs that describe them are at the beginning of the
block, and only if they have changed since the last message.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.data_loader.global_batches import GlobalBatch
from accelerate.data_loader.last_batch import Counts
from accelerate.data_loader.memory_pools import MemoryPool, SharedMemoryPool, share_memory
from accelerate.devices import of_device
from accelerate.nested import TensorInformation, is_tensor_information, recursively_apply
from accelerate.ops import ALIGNMENT, Transport, cached_layout, views_of

LARGE = 256 * 1024
"""Size of a block from which two copies take less time than sockets, in bytes."""
AHEAD = 16 * 1024 * 1024
"""Bytes that a receiver may not have copied yet when rank 0 sends more to it."""
HEADER = 4
"""Number of integers in the header of a message."""
_SAME_SPECS, _NEW_SPECS, _FAILED = range(3)
_LENGTH_BYTES = 8
"""Size of the length of the specs, which is stored before them."""

MessageHeader = tuple[int, ...]
Take = Callable[[int], Tensor | None]
"""Function that returns shared memory of this number of bytes, or None if no memory is shared."""


class PartSpec(NamedTuple):
    """Description of a packed part."""

    outline: Any  # its structure, with a `TensorInformation` for each tensor
    size: int  # bytes of its chunk
    counts: Counts | None  # of the global batch


class PackedPart(NamedTuple):
    """Packed part of a global batch."""

    spec: bytes  # the pickled `PartSpec`, which is compared with that of the part before
    chunk: Tensor  # the bytes of its tensors


class ReaderFailure(NamedTuple):
    """Exception of the rank that reads, with its traceback as text."""

    error: bytes | None
    text: str

    @staticmethod
    def of(error: BaseException) -> ReaderFailure:
        """Converts an exception for the other ranks."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # raised by the pickle methods of an exception class; its text is sent instead
            return ReaderFailure(None, text)
        return ReaderFailure(packed, text)

    def raise_here(self) -> None:
        """Raises the same exception, with the traceback of the rank that reads as its cause."""
        cause = RuntimeError(f"the loader failed on rank 0, which reads for all ranks:\n{self.text}")
        if self.error is None:
            raise cause
        raise pickle.loads(self.error) from cause


def pack(global_batch: GlobalBatch, group: int, take: Take = lambda size: None) -> PackedPart:
    """Packs the part of one group into bytes on the CPU, without a copy of one contiguous tensor."""
    tensors: list[Tensor] = []

    def is_dense(leaf: Any) -> bool:  # sparse, nested and quantized tensors are pickled in the spec
        is_strided = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        return is_strided and not (leaf.is_nested or leaf.is_quantized)

    def describe(tensor: Tensor) -> TensorInformation:
        tensors.append(tensor.detach().cpu())
        return TensorInformation(tensor.shape, tensor.dtype)

    outline = recursively_apply(describe, global_batch.parts[group], test_type=is_dense)
    layout = cached_layout(tuple((tensor.shape, tensor.dtype) for tensor in tensors))
    size = -(-layout.width // ALIGNMENT) * ALIGNMENT
    spec = PartSpec(outline, size, global_batch.counts)
    if size == layout.width and not any(tensor.is_inference() for tensor in tensors):
        return PackedPart(pickle.dumps(spec), layout.pack(tensors))
    chunk = take(size)
    if chunk is None:
        chunk = torch.empty(size, dtype=torch.uint8, device="cpu")
    layout.pack_into(tensors, chunk)
    return PackedPart(pickle.dumps(spec), chunk)


def unpack(spec: PartSpec, chunk: Tensor) -> Any:
    """Rebuilds a part, whose tensors use the memory of the chunk."""
    facts: list[tuple[torch.Size, torch.dtype]] = []

    def take(info: TensorInformation) -> TensorInformation:
        facts.append((info.shape, info.dtype))
        return info

    recursively_apply(take, spec.outline, test_type=is_tensor_information)
    tensors = iter(views_of(chunk, tuple(facts)))
    return recursively_apply(lambda info: next(tensors), spec.outline, test_type=is_tensor_information)


class ReceivedBatch(NamedTuple):
    """Part of a global batch for this process, with the attributes of `GlobalBatch`."""

    part: Any
    counts: Counts | None
    is_last: bool
    state: Any = None


class PackedBatch(NamedTuple):
    """Packed global batch."""

    batch: GlobalBatch
    parts: dict[int, PackedPart]  # for each group of another process
    size: int  # bytes of the largest part


class BatchSender:
    """Packs and sends global batches on rank 0."""

    def __init__(self, channel: BatchChannel) -> None:
        self._channel = channel
        self._receivers = channel.receivers
        self._sent_specs: dict[int, bytes] = {}

    def pack(self, batch: GlobalBatch) -> PackedBatch:
        """Packs a global batch in any thread, without sending it."""
        parts = {group: pack(batch, group, self._channel.take) for group in self._receivers}
        return PackedBatch(batch, parts, max((len(part.chunk) for part in parts.values()), default=0))

    def send(self, packed: list[PackedBatch]) -> None:
        """Sends global batches in one message, or the end of the pass if the list is empty."""
        if not self._receivers:
            return
        is_end = not packed or packed[-1].batch.is_last
        specs = {group: [item.parts[group].spec for item in packed] for group in self._receivers}
        is_new = any(spec != self._sent_specs.get(group) for group in specs for spec in specs[group])
        blocks = {}
        for group in self._receivers if packed else ():
            chunks = [item.parts[group].chunk for item in packed]
            if is_new:
                text = pickle.dumps(specs[group])
                chunks.insert(0, _align(len(text).to_bytes(_LENGTH_BYTES, "little") + text))
                self._sent_specs[group] = specs[group][-1]
            blocks[group] = chunks
        self._channel.send((_NEW_SPECS if is_new else _SAME_SPECS, len(packed), is_end), blocks)

    def fail(self, error: BaseException) -> None:
        """Sends an exception, which the other ranks raise."""
        if self._receivers:
            chunk = _align(pickle.dumps(ReaderFailure.of(error)))
            self._channel.send((_FAILED, 0, True), {group: [chunk] for group in self._receivers})


def receive_batches(channel: BatchChannel) -> Iterator[ReceivedBatch]:
    """Yields the batches of one pass on the ranks that do not read."""
    specs: list[PartSpec] = []
    is_end = 0
    while not is_end:
        (kind, num_batches, is_end), block = channel.receive()
        if kind == _FAILED:
            pickle.loads(block.cpu().numpy().data).raise_here()
        start = 0
        if kind == _NEW_SPECS:
            end = _LENGTH_BYTES + int.from_bytes(block[:_LENGTH_BYTES].cpu().numpy().tobytes(), "little")
            packed_specs = pickle.loads(block[_LENGTH_BYTES:end].cpu().numpy().data)
            specs = [pickle.loads(spec) for spec in packed_specs]
            start = -(-end // ALIGNMENT) * ALIGNMENT
        else:
            specs = specs[-1:] * num_batches
        for number, spec in enumerate(specs, 1):
            chunk = block[start : start + spec.size]
            # One of several chunks is copied, so that keeping one part doesn't keep the whole block.
            part = unpack(spec, chunk if num_batches == 1 else chunk.clone())
            yield ReceivedBatch(part, spec.counts, bool(is_end) and number == num_batches)
            start += spec.size


def _align(text: bytes) -> Tensor:
    """Returns bytes as a tensor, padded to a multiple of the alignment."""
    return torch.frombuffer(bytearray(text) + bytearray(-len(text) % ALIGNMENT), dtype=torch.uint8)


class BatchChannel:
    """Channel for messages from rank 0 to the other ranks, with a header for all and a block for each.

    The caller owns the block that it receives, which is in private memory.

    Small blocks are sent over the transport. If all ranks are on one node, large blocks on the CPU are copied
    through shared memory, which is opened after the first large block. All ranks make the same calls: rank 0
    calls `send`, the others `receive`.

    Args:
        group_of: The data-parallel group of each rank.
        device: Device of the blocks when they are sent.
    """

    def __init__(self, transport: Transport, group_of: Sequence[int], device: torch.device) -> None:
        self.transport = transport
        self.device = device
        self.receivers = sorted(set(group_of[1:]))
        self._group_of = group_of
        self._unused = torch.empty(0, dtype=torch.uint8, device=device)
        self._memory: SharedMemoryPool | None = None
        self._may_share = of_device(device).is_host
        self._private = MemoryPool()
        self._sent: list[Tensor] = []  # blocks in shared memory that receivers may not have copied yet
        self._sending: list[Callable[[], object]] = []  # functions that wait until their headers are sent
        self._unread = 0  # bytes of these blocks, for each receiver

    @property
    def is_sharing(self) -> bool:
        """True if shared memory is open."""
        return self._memory is not None

    def take(self, size: int, is_own: bool = False) -> Tensor | None:
        """Returns memory on rank 0 for bytes to be sent or for its own part, or None if none is shared."""
        if self._memory is None or size < LARGE:
            return None
        return self._private.take(size) if is_own else self._memory.take(size)

    def keep(self, part: Any) -> Any:
        """Copies the tensors of the part of rank 0 that are in shared memory, for the caller to own."""
        memory = self._memory
        if memory is None:
            return part
        return recursively_apply(torch.clone, part, test_type=lambda leaf: memory.find(leaf) is not None)

    def send(self, header: MessageHeader, blocks: Mapping[int, Sequence[Tensor]]) -> None:
        """Sends `HEADER` - 1 integers from rank 0 to all ranks, and chunks to each of `receivers`."""
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
        """Returns the header and the block of this process, on other ranks than rank 0."""
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
        return tuple(header), self._private.take(size).copy_(self._memory.view(sent[HEADER + index], size))

    def _send_header(self, header: Tensor, may_wait: bool) -> None:
        if self._memory is None or (may_wait and self._unread < AHEAD):
            self.transport.broadcast(header, 0)
        elif self._unread < AHEAD:
            self._sending.append(self.transport.start_broadcast(header, 0))
        else:
            for wait in self._sending:
                wait()
            # It returns when all ranks have called it. They have then copied the blocks before this message.
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
            padding = torch.empty(size - sum(map(len, chunks)), dtype=torch.uint8, device="cpu")
            block = torch.cat([*chunks, padding]) if len(chunks) > 1 or len(padding) else chunks[0]
            joined[group] = block.to(self.device)
        if self.transport.size == 2:  # the same for one receiver, without a block for rank 0
            self.transport.broadcast(joined[self._group_of[1]], 0)
            return
        if len(self._unused) < size:  # the block of rank 0, which has its part already
            self._unused = torch.zeros(size, dtype=torch.uint8, device=self.device)
        own = self._unused[:size]
        self.transport.scatter([own, *(joined[group] for group in self._group_of[1:])], own, 0)


def _in_memory(memory: SharedMemoryPool, chunks: Sequence[Tensor], size: int) -> Tensor:
    """Returns chunks as one block in shared memory, without a copy of a single chunk that is there."""
    if len(chunks) == 1 and len(chunks[0]) == size and memory.find(chunks[0]) is not None:
        return chunks[0]
    block = memory.take(size)
    torch.cat(list(chunks), out=block[: sum(map(len, chunks))])
    return block


class SharedMemoryCollate:
    """Torch's default collate function, which stacks large tensors in the memory of a channel.

    Args:
        group: Index of the batch for this process in each global batch. If it is wrong, the batch is copied
            once more.
        num_batches: Number of batches of each global batch.
    """

    def __init__(self, channel: BatchChannel, group: int, num_batches: int) -> None:
        self._channel = channel
        self._group = group if num_batches > 1 else None
        self._indices = cycle(range(num_batches))
        functions = torch_private.collate.default_collate_fn_map
        self._functions = {**functions, Tensor: self._stack}

    def __call__(self, samples: Any) -> Any:
        self._is_own = next(self._indices) == self._group
        return torch_private.collate.collate(samples, collate_fn_map=self._functions)

    def _stack(self, tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
        first, out = tensors[0], None
        if self._channel.is_sharing and _is_like(first, first) and not torch.is_inference_mode_enabled():
            out = self._channel.take(len(tensors) * first.nbytes, self._is_own)
        if out is None or not all(_is_like(tensor, first) for tensor in tensors):
            return torch_private.collate.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return torch.stack(list(tensors), out=out.view(first.dtype).view(len(tensors), *first.shape))


def _is_like(tensor: Tensor, first: Tensor) -> bool:
    """Returns whether torch.stack copies the bytes of a tensor like those of the first one."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    if not tensor.is_cpu or tensor.requires_grad:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.dtype == first.dtype and tensor.shape == first.shape and tensor.is_contiguous()
