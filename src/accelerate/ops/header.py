"""The header of a collective: one small all-gather of fixed size with which it begins.

It contains a number that identifies the operation of the process, so that all processes detect a mismatch; a
length; and the payload itself where that is small, so that nothing else has to be sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_PREFIX = 16  # the mark and the length, eight bytes each
_WINDOWS_KEPT = 256
_WIDEST, _NARROWEST, _ALL_TOGETHER = 8192, 1024, 256 * 1024

GatherInto = Callable[[Tensor, Tensor], object]


def width_of(size: int) -> int:
    """Return the bytes of one process's header: fewer where there are many processes."""
    return max(_NARROWEST, min(_WIDEST, _ALL_TOGETHER // size // _PREFIX * _PREFIX))


class Header:
    """Buffers for the headers of all processes, and their exchange. Used by one thread at a time.

    Args:
        size: Number of processes.
        gather: Fills its first argument with the second one of all processes, in rank order; on the CPU.

    Attributes:
        room: Bytes of payload in a header.
        payload: The payload of this process, to be written before an exchange.
        rows: The payloads of all processes after it, one row each; valid until the next exchange.
    """

    def __init__(self, size: int, gather: GatherInto) -> None:
        width = width_of(size)
        with torch.inference_mode(False):  # the buffers are written outside it as well
            self._sent = torch.zeros(width, dtype=torch.uint8, device="cpu")
            self._arrived = torch.zeros(size * width, dtype=torch.uint8, device="cpu")
        self._gather = gather
        self.room = width - _PREFIX
        self.payload = self._sent[_PREFIX:]
        self.rows = self._arrived.view(size, width)[:, _PREFIX:]
        self._sent_bytes = self._sent.numpy().data
        self._arrived_bytes = self._arrived.numpy().data
        self._sent_numbers = self._sent_bytes.cast("q")
        self._arrived_numbers = self._arrived_bytes.cast("q")
        self._starts = range(0, size * width, width)
        self._elements: dict[torch.dtype, Tensor] = {}
        self._windows: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def put(self, payload: bytes | memoryview) -> None:
        """Write bytes into `payload`; at most `room`."""
        self._sent_bytes[_PREFIX : _PREFIX + len(payload)] = payload

    def windows(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """View some bytes of `payload` and of `rows` as elements of a dtype; the same views each time.

        Args:
            start: First byte.
            stop: One past the last byte.
            dtype: Of the elements; both ends suit it.
        """
        key = (start, stop, dtype)
        if key not in self._windows:
            if len(self._windows) >= _WINDOWS_KEPT:
                self._windows.clear()
            with torch.inference_mode(False):
                views = (self.payload[start:stop].view(dtype), self.rows[:, start:stop].view(dtype))
            self._windows[key] = views
        return self._windows[key]

    def elements(self, dtype: torch.dtype) -> Tensor:
        """View all headers, prefixes included, as elements of a dtype; the same view each time."""
        if dtype not in self._elements:
            with torch.inference_mode(False):
                self._elements[dtype] = self._arrived.view(dtype)
        return self._elements[dtype]

    def positions(self, start: int, dtype: torch.dtype, counts: list[int]) -> Tensor:
        """Return where in `elements` leaves are: for each leaf its elements of all processes, in rank order.

        Args:
            start: First byte of the leaves in a payload.
            dtype: Of the leaves, which are neighbours.
            counts: Number of elements of each.

        Returns:
            Indices, 1-d int64.
        """
        firsts = (
            torch.tensor(self._starts, device="cpu")
            .add_(_PREFIX + start)
            .div_(dtype.itemsize, rounding_mode="floor")
        )
        rows = firsts[:, None] + torch.arange(sum(counts), device="cpu")
        return torch.cat([part.reshape(-1) for part in rows.split_with_sizes(counts, 1)])

    def exchange(self, mark: int, length: int = 0) -> bool:
        """Send the header of this process and receive all; called on all ranks.

        Args:
            mark: Identifies what this process does; 64 bits, signed.
            length: Bytes of its payload, which is not in the header where it is larger than `room`.

        Returns:
            Whether the marks of all processes are the same; the result is equal on all of them.
        """
        self._sent_numbers[0] = mark
        self._sent_numbers[1] = length
        self._gather(self._arrived, self._sent)
        arrived = self._arrived_numbers
        return all(arrived[start // 8] == mark for start in self._starts)

    def lengths(self) -> list[int]:
        """The lengths of all processes in the last exchange."""
        return [self._arrived_numbers[start // 8 + 1] for start in self._starts]

    def payloads(self) -> list[memoryview]:
        """The payloads of the last exchange, cut to their lengths; valid until the next one."""
        return [
            self._arrived_bytes[start + _PREFIX : start + _PREFIX + length]
            for start, length in zip(self._starts, self.lengths(), strict=True)
        ]
