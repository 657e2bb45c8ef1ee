"""A part of a round as a chunk of bytes with its tensors, and a spec that says what they are."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from accelerate.data_loader.rounds import Round
from accelerate.data_loader.validity import Counts
from accelerate.nested import recursively_apply

ALIGNMENT = 16  # bytes; any dtype may be viewed at such an offset


class Slot(NamedTuple):
    """Where a tensor lies in the chunk of its part."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Spec(NamedTuple):
    """What one group gets of a round.

    Attributes:
        outline: The part, with a `Slot` in place of each tensor.
        size: Bytes of its chunk, a multiple of `ALIGNMENT`.
        counts: See `Round`.
        is_last: Whether it is the last batch.
    """

    outline: Any
    size: int
    counts: Counts | None
    is_last: bool


class Piece(NamedTuple):
    """A part, packed: its pickled `Spec`, which can be compared with the one before, and its chunk."""

    spec: bytes
    chunk: torch.Tensor


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


def pack(dealt: Round, group: int) -> Piece:
    """Lay the tensors of one group's part out in a chunk of bytes on the CPU.

    A part that is one contiguous tensor is not copied: the chunk is its memory.
    """
    part = dealt.parts[group]
    layout = _Layout()
    outline = recursively_apply(layout.place, part, test_type=_is_plain_tensor)
    spec = Spec(outline, layout.end, dealt.counts, dealt.is_last)
    return Piece(pickle.dumps(spec), layout.fill())


def unpack(spec: Spec, chunk: torch.Tensor) -> Any:
    """Rebuild a part; its tensors lie in the chunk's own memory."""

    def fetch(slot: Slot) -> torch.Tensor:
        if not slot.size:
            return torch.empty(slot.shape, dtype=slot.dtype, device=chunk.device)
        return chunk[slot.offset : slot.offset + slot.size].view(slot.dtype).view(slot.shape)

    return recursively_apply(fetch, spec.outline, test_type=_is_slot)


class _Layout:
    """Gives each tensor of one part its place."""

    def __init__(self) -> None:
        self.end = 0
        self.placed: list[tuple[Slot, torch.Tensor]] = []

    def place(self, tensor: torch.Tensor) -> Slot:
        tensor = tensor.detach()
        slot = Slot(self.end, tuple(tensor.shape), tensor.dtype)
        self.placed.append((slot, tensor))
        self.end += -(-slot.size // ALIGNMENT) * ALIGNMENT
        return slot

    def fill(self) -> torch.Tensor:
        if len(self.placed) == 1:
            slot, tensor = self.placed[0]
            if slot.size and slot.size == self.end and _is_its_memory(tensor):
                return tensor.reshape(-1).view(torch.uint8)
        chunk = torch.empty(self.end, dtype=torch.uint8, device="cpu")
        for slot, tensor in self.placed:
            if slot.size:
                place = chunk[slot.offset : slot.offset + slot.size]
                place.view(slot.dtype).view(slot.shape).copy_(tensor)
        return chunk


def _is_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor, as they lie on the CPU, are what it means."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def _is_plain_tensor(leaf: Any) -> bool:
    """Whether a tensor is a stretch of bytes; sparse and quantised ones travel in the spec."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_quantized


def _is_slot(leaf: Any) -> bool:
    return isinstance(leaf, Slot)
