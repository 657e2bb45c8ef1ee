"""A round as one message: the tensors of all parts in one block of bytes, the rest in a small header."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from accelerate.data_loader.rounds import Round
from accelerate.data_loader.validity import Counts
from accelerate.nested import recursively_apply

_ALIGNMENT = 16  # bytes; any dtype may be viewed at such an offset


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the block of its part."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What a round looks like.

    Attributes:
        outlines: The parts, with a `Slot` in place of each tensor.
        starts: Where the block of each part begins, and where the last one ends.
        counts: See `Round`.
        ends: See `Round`.
    """

    outlines: list[Any]
    starts: list[int]
    counts: Counts | None
    ends: list[bool]


@dataclass(frozen=True)
class Failure:
    """The reading process' exception, with its traceback as text."""

    error: bytes | None
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Take an exception down so that every process can raise it."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # whatever an exception class does to its own pickle; its text says enough
            return Failure(None, text)
        return Failure(packed, text)

    def raise_here(self) -> None:
        """Raise the same exception here, with the reading process' traceback as its cause."""
        cause = RuntimeError(f"the loader failed on process 0, which reads for all:\n{self.text}")
        if self.error is None:
            raise cause
        raise pickle.loads(self.error) from cause


def pack(dealt: Round, device: torch.device) -> tuple[Header, torch.Tensor]:
    """Lay the tensors of a round out in one block of bytes on `device`."""
    outlines, starts, placed, end = [], [], [], 0
    for part in dealt.parts:
        starts.append(end)
        layout = _Layout()
        outlines.append(recursively_apply(layout.place, part, test_type=_is_plain_tensor))
        placed += [(end + slot.offset, tensor) for slot, tensor in layout.placed]
        end += layout.end
    block = torch.empty(end, dtype=torch.uint8, device=device)
    for offset, tensor in placed:
        if size := tensor.numel() * tensor.itemsize:
            block[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return Header(outlines, [*starts, end], dealt.counts, dealt.ends), block


def unpack(header: Header, index: int, block: torch.Tensor) -> Any:
    """Rebuild the part of one group from the round's block of bytes; the block may be used again."""
    mine = block[header.starts[index] : header.starts[index + 1]].clone()

    def fetch(slot: Slot) -> torch.Tensor:
        if not slot.size:
            return torch.empty(slot.shape, dtype=slot.dtype, device=mine.device)
        return mine[slot.offset : slot.offset + slot.size].view(slot.dtype).view(slot.shape)

    return recursively_apply(fetch, header.outlines[index], test_type=_is_slot)


class _Layout:
    """Gives each tensor of one part its place."""

    def __init__(self) -> None:
        self.end = 0
        self.placed: list[tuple[Slot, torch.Tensor]] = []

    def place(self, tensor: torch.Tensor) -> Slot:
        tensor = tensor.detach()
        slot = Slot(self.end, tuple(tensor.shape), tensor.dtype)
        self.placed.append((slot, tensor))
        self.end += -(-slot.size // _ALIGNMENT) * _ALIGNMENT
        return slot


def _is_plain_tensor(leaf: Any) -> bool:
    """Whether a tensor is a stretch of bytes; sparse and quantised ones travel in the header."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_quantized


def _is_slot(leaf: Any) -> bool:
    return isinstance(leaf, Slot)
