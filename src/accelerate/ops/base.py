"""Interface of the transports that run collectives, and the header that precedes their payload.

`Transport` is the implementation for a single process. It handles single tensors and single objects. The
functions of `ops/packed.py`, which call it, flatten nested data first.
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

_PREFIX_BYTES = 16  # the fingerprint and the length, eight bytes each
_MAX_CACHED_VIEWS = 256
_MAX_WIDTH, _MIN_WIDTH, _MAX_TOTAL_WIDTH = 8192, 1024, 256 * 1024  # bytes; the total is for all ranks


class Transport:
    """Transport of a single process, whose calls send nothing and return their argument.

    The flight recorder records the calls of subclasses.
    """

    size: int = 1
    rank: int = 0
    # True if shapes are compared before each collective, also outside debug mode, because this does not
    # synchronize with a device.
    verifies: bool = False
    header: Header | None = None  # precedes collectives of CPU tensors; None if those are not supported

    def __init_subclass__(cls) -> None:
        for name, member in list(vars(cls).items()):
            if isinstance(member, FunctionType) and not name.startswith("_"):
                setattr(cls, name, recorded(member, argument=1))

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks concatenated along their first dimension in rank order.

        Shapes and dtypes are equal on all ranks. A 0-d tensor counts as `[1]`.
        """
        return tensor

    def gather_object(self, obj: object) -> list[Any]:
        """Returns the picklable objects of all ranks in rank order, on every rank."""
        return [obj]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites `tensor` with that of rank `source` and returns it.

        Shapes are equal on all ranks.
        """
        return tensor

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        """Starts an asynchronous broadcast from this rank, which the others receive with `broadcast`.

        The tensor must not change before the returned function, which waits for the end, has been called.
        """
        self.broadcast(tensor, source)
        return lambda: None

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Returns the object of rank `source` on every rank.

        The source gets the same object and not a copy.
        """
        return obj

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Returns the elementwise reduction of the tensors of all ranks.

        Shapes and dtypes are equal on all ranks. `how` is "sum", "mean", "max" or "min". Half-precision
        tensors are summed in float32. Integers and booleans are summed in int64, as `torch.sum` does, and
        their mean has the default floating dtype. A single process returns the argument itself.
        """
        return tensor

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        """Fills `out` with the tensor that rank `source` has for this rank, and returns it.

        On the source, `parts` has one tensor for each rank, with the shape and dtype of `out`. This
        implementation broadcasts all parts.
        """
        if self.rank == source:
            stacked = torch.stack(list(check_scatter_parts(parts, self.size)))
        else:
            stacked = out.new_empty((self.size, *out.shape))
        return out.copy_(self.broadcast(stacked, source)[self.rank])

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends a part of a flat tensor to each rank, and returns the parts from all ranks in rank order.

        Args:
            tensor: 1-d tensor with the parts in rank order.
            sent: Number of elements for each rank.
            received: Number of elements from each rank.

        This implementation gathers all parts on all ranks.
        """
        if self.size == 1:
            return tensor
        parts = [as_supported(part).clone() for part in torch.split(tensor.detach().cpu(), list(sent))]
        own = [ranks[self.rank] for ranks in self.gather_object(parts)]
        return torch.cat(own).view(tensor.dtype).to(tensor.device)

    def barrier(self) -> None:
        """Waits until all ranks have called this."""


def check_scatter_parts(parts: Sequence[Tensor] | None, size: int) -> Sequence[Tensor]:
    """Returns the tensors to scatter, or raises an error unless there is one for each rank."""
    if parts is None or len(parts) != size:
        num_parts = None if parts is None else len(parts)
        raise wrong_value("parts", num_parts, f"there are {size} processes", "Give one part for each of them")
    return parts


# Dtypes that both gloo and NCCL support. Other dtypes are sent as bytes where nothing is computed.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SUPPORTED_DTYPES = frozenset((*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64))


def as_supported(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a view of its memory as bytes if a backend may not support its dtype."""
    return tensor if tensor.dtype in _SUPPORTED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def reducible_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tensors of `dtype` are reduced.

    It is wide enough for a sum, and supported by all backends.
    """
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def reduction_name(how: str) -> str:
    """Returns the name of the reduction in `torch.distributed.ReduceOp`.

    A mean is a sum that is divided afterwards.
    """
    if how not in REDUCTIONS:
        raise wrong_value("how", how, "no such reduction", f"Use one of {', '.join(REDUCTIONS)}")
    return "SUM" if how == "mean" else how.upper()


def finish_reduction(total: Tensor, how: str, size: int, tensor: Tensor) -> Tensor:
    """Divides the sum for a mean, and converts the result to the device and dtype of `tensor`.

    Sums and means of integers and booleans keep the dtype of `total`.
    """
    is_integral = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if how == "mean":
        total = total / size
    if is_integral and how in ("sum", "mean"):
        return total.to(tensor.device)
    return total.to(device=tensor.device, dtype=tensor.dtype)


def header_width(size: int) -> int:
    """Returns the size of the header of one rank in bytes, which decreases with the world size."""
    return max(_MIN_WIDTH, min(_MAX_WIDTH, _MAX_TOTAL_WIDTH // size // _PREFIX_BYTES * _PREFIX_BYTES))


class Header:
    """Buffers for the headers of all ranks, and the all-gather that exchanges them.

    The headers are exchanged in a small all-gather of fixed size. A header contains the fingerprint of the
    operation, so that all ranks detect a mismatch, the length of the payload, and the payload itself if it is
    small, so that nothing else has to be sent. Used by one thread at a time.

    Args:
        gather: Fills its first argument with the second one of all ranks in rank order, on the CPU.
    """

    def __init__(self, size: int, gather: Callable[[Tensor, Tensor], object]) -> None:
        width = header_width(size)
        with torch.inference_mode(False):  # the buffers are also written outside of inference mode
            self._sent = torch.zeros(width, dtype=torch.uint8, device="cpu")
            self._received = torch.zeros(size * width, dtype=torch.uint8, device="cpu")
        self._gather = gather
        self.capacity = width - _PREFIX_BYTES  # bytes of payload in a header
        self.payload = self._sent[_PREFIX_BYTES:]  # of this rank, to be written before an exchange
        # The payloads of all ranks after an exchange, valid until the next one.
        self.rows = self._received.view(size, width)[:, _PREFIX_BYTES:]
        self._sent_bytes = self._sent.numpy().data
        self._received_bytes = self._received.numpy().data
        self._sent_numbers = self._sent_bytes.cast("q")
        self._received_numbers = self._received_bytes.cast("q")
        self._starts = range(0, size * width, width)
        self._elements: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def put(self, payload: bytes | memoryview) -> None:
        """Writes at most `capacity` bytes into `payload`."""
        self._sent_bytes[_PREFIX_BYTES : _PREFIX_BYTES + len(payload)] = payload

    def views(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns views of a range of bytes of `payload` and of `rows` as elements of a dtype.

        The views are cached.
        """
        key = (start, stop, dtype)
        if key not in self._views:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                views = (self.payload[start:stop].view(dtype), self.rows[:, start:stop].view(dtype))
            self._views[key] = views
        return self._views[key]

    def elements(self, dtype: torch.dtype) -> Tensor:
        """Returns a cached view of all headers, with their prefixes, as elements of a dtype."""
        if dtype not in self._elements:
            with torch.inference_mode(False):
                self._elements[dtype] = self._received.view(dtype)
        return self._elements[dtype]

    def positions(self, start: int, dtype: torch.dtype, counts: list[int]) -> Tensor:
        """Returns the indices into `elements` of each leaf of all ranks, leaf by leaf in rank order.

        The leaves are adjacent in a payload, from byte `start` on, with `counts` elements.
        """
        firsts = (
            torch.tensor(self._starts, device="cpu")
            .add_(_PREFIX_BYTES + start)
            .div_(dtype.itemsize, rounding_mode="floor")
        )
        rows = firsts[:, None] + torch.arange(sum(counts), device="cpu")
        return torch.cat([part.reshape(-1) for part in rows.split_with_sizes(counts, 1)])

    def exchange(self, fingerprint: int, length: int = 0) -> bool:
        """Exchanges the headers of all ranks, and returns whether all fingerprints are equal.

        The result is the same on all ranks.

        Args:
            fingerprint: Identifies the operation of this rank, as a signed number of 64 bits.
            length: Bytes of the payload, which is not in the header if it is larger than `capacity`.
        """
        self._sent_numbers[0] = fingerprint
        self._sent_numbers[1] = length
        self._gather(self._received, self._sent)
        received = self._received_numbers
        return all(received[start // 8] == fingerprint for start in self._starts)

    def lengths(self) -> list[int]:
        return [self._received_numbers[start // 8 + 1] for start in self._starts]

    def payloads(self) -> list[memoryview]:
        """Returns the payloads of the last exchange without padding, valid until the next exchange."""
        return [
            self._received_bytes[start + _PREFIX_BYTES : start + _PREFIX_BYTES + length]
            for start, length in zip(self._starts, self.lengths(), strict=True)
        ]
