"""What process 0 sends of a dispatched loader: some rounds, each process its own part of them.

A message is a head of four integers that every process gets, and a block of bytes for each. The block holds
the tensors of the parts, one round after the other; what they look like is told before them only when it has
changed since the last message.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from accelerate.data_loader.dispatch_packing import ALIGNMENT, Failure, Piece, Spec, pack, unpack
from accelerate.data_loader.dispatch_transport import Route
from accelerate.data_loader.rounds import Round
from accelerate.data_loader.validity import Counts

_AS_BEFORE, _TOLD, _FAILED = range(3)
_NUMBER = 8  # bytes: the length of the specs, before them


class Arrival(NamedTuple):
    """A batch for this process, with what is known of it."""

    part: Any
    counts: Counts | None
    is_last: bool
    note: Any = None


class Packed(NamedTuple):
    """A round that is ready to be sent.

    Attributes:
        dealt: The round.
        pieces: For each group that somebody else is in, its part.
        size: Bytes of the largest of them.
    """

    dealt: Round
    pieces: dict[int, Piece]
    size: int


class Sender:
    """Process 0's end.

    Args:
        route: The way to the others.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._others = route.receivers
        self._told: dict[int, bytes] = {}

    def pack(self, dealt: Round) -> Packed:
        """Pack a round; nothing is sent, any thread may do it."""
        pieces = {group: pack(dealt, group) for group in self._others}
        return Packed(dealt, pieces, max((len(piece.chunk) for piece in pieces.values()), default=0))

    def send(self, rounds: list[Packed]) -> None:
        """Send rounds in one message; none says that the pass has ended."""
        if not self._others:
            return
        is_end = not rounds or rounds[-1].dealt.is_last
        specs = {group: [one.pieces[group].spec for one in rounds] for group in self._others}
        is_told = any(spec != self._told.get(group) for group in specs for spec in specs[group])
        blocks = {}
        for group in self._others if rounds else ():
            chunks = [one.pieces[group].chunk for one in rounds]
            if is_told:
                chunks.insert(0, _spell(specs[group]))
                self._told[group] = specs[group][-1]
            blocks[group] = chunks
        self._route.send((_TOLD if is_told else _AS_BEFORE, len(rounds), is_end), blocks)

    def fail(self, error: BaseException) -> None:
        """Send an exception instead."""
        if self._others:
            chunk = _padded(pickle.dumps(Failure.of(error)))
            self._route.send((_FAILED, 0, True), {group: [chunk] for group in self._others})


def receive(route: Route) -> Iterator[Arrival]:
    """The other processes' end: the batches of one pass.

    Args:
        route: The way from process 0.
    """
    specs: list[Spec] = []
    is_end = 0
    while not is_end:
        (kind, rounds, is_end), block = route.receive()
        if kind == _FAILED:
            pickle.loads(block.cpu().numpy().data).raise_here()
        start = 0
        if kind == _TOLD:
            told, start = _read(block)
            specs = [pickle.loads(spec) for spec in told]
        else:
            specs = specs[-1:] * rounds
        for spec in specs:
            chunk = block[start : start + spec.size]
            # Alone in its block it stays there; of several ones each gets memory of its own, so that keeping
            # one doesn't keep them all.
            part = unpack(spec, chunk if rounds == 1 else chunk.clone())
            yield Arrival(part, spec.counts, spec.is_last)
            start += spec.size


def _spell(specs: list[bytes]) -> torch.Tensor:
    text = pickle.dumps(specs)
    return _padded(len(text).to_bytes(_NUMBER, "little") + text)


def _read(block: torch.Tensor) -> tuple[list[bytes], int]:
    """The pickled specs at the beginning of a block, and where the tensors begin."""
    length = int.from_bytes(block[:_NUMBER].cpu().numpy().tobytes(), "little")
    end = _NUMBER + length
    return pickle.loads(block[_NUMBER:end].cpu().numpy().data), -(-end // ALIGNMENT) * ALIGNMENT


def _padded(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text) + bytearray(-len(text) % ALIGNMENT), dtype=torch.uint8)
