"""The interface of all transports, and the header with which their collectives begin.

`Transport` is the one for a single process. It handles single tensors and single objects; its callers take
nested data apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from accelerate.base import wrong_value
from accelerate.ops.flight_record import recorded

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]
REDUCTIONS = get_args(Reduction)

_PREFIX = 16  # the mark and the length, eight bytes each
_WINDOWS_KEPT = 256
_WIDEST, _NARROWEST, _ALL_TOGETHER = 8192, 1024, 256 * 1024


class Transport:
    """One process: nothing is sent, every call returns what it was given.

    The calls of subclasses are in the flight record.
    """

    size: int = 1
    rank: int = 0
    # Shapes are compared before each collective, also outside debug mode: there is no device to wait for.
    verifies: bool = False
    header: Header | None = None  # begins collectives of CPU tensors; None where those are not supported

    def __init_subclass__(cls) -> None:
        for name, member in list(vars(cls).items()):
            if isinstance(member, FunctionType) and not name.startswith("_"):
                setattr(cls, name, recorded(member, argument=1))

    def gather(self, tensor: Tensor) -> Tensor:
        """Join tensors of one shape and dtype along their first dimension, by rank; 0-d counts as `[1]`."""
        return tensor

    def gather_object(self, obj: Any) -> list[Any]:
        """Collect one picklable object of each process, in rank order, on every process."""
        return [obj]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `source` and return it; shapes are equal on all ranks."""
        return tensor

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        """Start a broadcast from this rank, which the others receive by `broadcast`.

        The tensor must not change before the returned function, which waits for the end, was called.
        """
        self.broadcast(tensor, source)
        return lambda: None

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Return rank `source`'s object on every process; on the source it is the very object given."""
        return obj

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Combine tensors of one shape and dtype element by element: "sum", "mean", "max" or "min".

        Sums of half-precision numbers are formed in float32. Integers and booleans are summed in int64, as
        `torch.sum` does; their mean has the default floating dtype. One process returns the argument itself.
        """
        return tensor

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        """Fill `out` with the part of this process of what rank `source` has; here by a broadcast of all.

        On the source `parts` has one tensor for each process, of the shape and dtype of `out`.
        """
        if self.rank == source:
            stacked = torch.stack(list(one_for_each(parts, self.size)))
        else:
            stacked = out.new_empty((self.size, *out.shape))
        return out.copy_(self.broadcast(stacked, source)[self.rank])

    def barrier(self) -> None:
        """Wait until all processes have called this."""


def one_for_each(parts: Sequence[Tensor] | None, size: int) -> Sequence[Tensor]:
    """Return the parts to scatter; refuse them unless there is one for each process."""
    if parts is None or len(parts) != size:
        given = None if parts is None else len(parts)
        raise wrong_value("parts", given, f"there are {size} processes", "Give one part for each of them")
    return parts


# What both gloo and NCCL support. Other dtypes are sent as bytes when they are only moved.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SUPPORTED_DTYPES = frozenset((*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64))


def as_supported(tensor: Tensor) -> Tensor:
    """The same memory under a dtype that every transport supports."""
    return tensor if tensor.dtype in _SUPPORTED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def reducible_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are combined: wide enough for a sum, and supported everywhere."""
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def reduction_name(how: str) -> str:
    """Return how torch calls the operation of a reduction: a mean is a sum that is divided afterwards."""
    if how not in REDUCTIONS:
        raise wrong_value("how", how, "no such reduction", f"Use one of {', '.join(REDUCTIONS)}")
    return "SUM" if how == "mean" else how.upper()


def finished_reduction(total: Tensor, how: str, size: int, given: Tensor) -> Tensor:
    """Divide the combined numbers for a mean, and convert them to the dtype and device of `given`."""
    exact = not (given.dtype.is_floating_point or given.dtype.is_complex)
    if how == "mean":
        total = total / size
    if exact and how in ("sum", "mean"):
        return total.to(given.device)
    return total.to(device=given.device, dtype=given.dtype)


def width_of(size: int) -> int:
    """Return the bytes of one process's header: fewer where there are many processes."""
    return max(_NARROWEST, min(_WIDEST, _ALL_TOGETHER // size // _PREFIX * _PREFIX))


class Header:
    """Buffers for the headers of all processes, and their exchange. Used by one thread at a time.

    A header is a small all-gather of fixed size. It contains a number that identifies the operation, so that
    all processes detect a mismatch; a length; and the payload itself where that is small, so that nothing
    else has to be sent. `gather` fills its first argument with the second one of all processes, in rank
    order; on the CPU.
    """

    def __init__(self, size: int, gather: Callable[[Tensor, Tensor], object]) -> None:
        width = width_of(size)
        with torch.inference_mode(False):  # the buffers are written outside it as well
            self._sent = torch.zeros(width, dtype=torch.uint8, device="cpu")
            self._arrived = torch.zeros(size * width, dtype=torch.uint8, device="cpu")
        self._gather = gather
        self.room = width - _PREFIX  # bytes of payload in a header
        self.payload = self._sent[_PREFIX:]  # of this process, to be written before an exchange
        # The payloads of all processes after it; valid until the next exchange.
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
        """View some bytes of `payload` and of `rows` as elements of a dtype; the same views each time."""
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

        The leaves are neighbours in a payload, from byte `start` on, with `counts` elements.
        """
        firsts = (
            torch.tensor(self._starts, device="cpu")
            .add_(_PREFIX + start)
            .div_(dtype.itemsize, rounding_mode="floor")
        )
        rows = firsts[:, None] + torch.arange(sum(counts), device="cpu")
        return torch.cat([part.reshape(-1) for part in rows.split_with_sizes(counts, 1)])

    def exchange(self, mark: int, length: int = 0) -> bool:
        """Send the header of this process and receive all; return, equally on all, whether all marks agree.

        `mark` identifies what this process does, in 64 bits, signed; `length` is the bytes of its payload,
        which is not in the header where it is larger than `room`.
        """
        self._sent_numbers[0] = mark
        self._sent_numbers[1] = length
        self._gather(self._arrived, self._sent)
        arrived = self._arrived_numbers
        return all(arrived[start // 8] == mark for start in self._starts)

    def lengths(self) -> list[int]:
        return [self._arrived_numbers[start // 8 + 1] for start in self._starts]

    def payloads(self) -> list[memoryview]:
        """The payloads of the last exchange, cut to their lengths; valid until the next one."""
        return [
            self._arrived_bytes[start + _PREFIX : start + _PREFIX + length]
            for start, length in zip(self._starts, self.lengths(), strict=True)
        ]
