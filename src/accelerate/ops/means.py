"""Means of tensors over the ranks, which are computed asynchronously, in full precision or sent as int8.

Local SGD exchanges weights with them, while the ranks train.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.ops.flight_record import flight_recorder
from accelerate.ops.transport import all_gather_flat, current_transport, supported_devices
from accelerate.state import PartialState

BLOCK = 256
"""Numbers with one scale, of which int8 values are multiples."""
_SCALE_BYTES = 4

Phases = Generator[None, None, Tensor]
"""Computation of a mean, which yields after its start and halfway, and returns the mean."""


class Mean:
    """Mean of a tensor over ranks, which is being computed.

    Args:
        phases: The computation, of which this runs the first phase.
        purpose: Name in the flight recorder while a rank waits.
    """

    def __init__(self, phases: Phases, purpose: str) -> None:
        self._phases, self._purpose = phases, purpose
        self._result: Tensor | None = None
        self._is_halfway = False
        next(phases)

    def advance(self) -> None:
        """Runs the second phase, which starts the second collective of a mean that has two."""
        if not self._is_halfway:
            self._is_halfway = True
            with flight_recorder().entry(self._purpose):
                next(self._phases)

    def wait(self) -> Tensor:
        """Waits for the mean, and returns it, also when it is called again."""
        self.advance()
        if self._result is None:
            with flight_recorder().entry(self._purpose):
                self._result = _last(self._phases)
        return self._result


class KnownMean(Mean):
    """Mean that is computed already."""

    def __init__(self, result: Tensor) -> None:
        self._result, self._is_halfway = result, True


def _last(phases: Phases) -> Tensor:
    """Runs the last phase of a computation, and returns its result."""
    try:
        next(phases)
    except StopIteration as end:
        result: Tensor = end.value
        return result
    raise AssertionError("a computation of a mean has another phase")


class MeanGroup:
    """Group of all ranks that computes means, with the bytes that this rank has sent to the others.

    Created and used on all ranks, in the same order.

    Args:
        purpose: Name of the means in the flight recorder and in hang reports.
        is_separate: Whether it has a process group of its own, so that other collectives do not wait for
            means that are being computed.

    Attributes:
        bytes_sent: Bytes that this rank has sent, as counted for collectives that send nothing twice: an
            all-reduce sends `2 * (size - 1) / size` of its bytes, an all-to-all and an all-gather half of it.
    """

    def __init__(self, purpose: str, *, is_separate: bool = False) -> None:
        self._purpose = purpose
        self.size = current_transport().size
        self.bytes_sent = 0
        self._group: dist.ProcessGroup | None = None
        if self.size > 1 and is_separate:
            with flight_recorder().entry(purpose):
                self._group = dist.new_group()

    def start(self, tensor: Tensor, *, as_int8: bool = False) -> Mean:
        """Starts to compute the mean of a tensor, which may be overwritten.

        Args:
            tensor: 1-d tensor in float32 or float64, of the same size on all ranks.
            as_int8: Whether int8 values with one float32 scale for each `BLOCK` of them are sent. They are
                added up in float32, and all ranks get the same rounded mean.
        """
        if self.size == 1:
            return KnownMean(tensor)
        sent = tensor.to(self._device_for(tensor.device))
        compute: Callable[[Tensor], Phases] = self._mean_as_int8 if as_int8 else self._mean
        return Mean(self._on(tensor.device, compute(sent)), self._purpose)

    @staticmethod
    def _device_for(device: torch.device) -> torch.device:
        """Returns the device on which the group sends tensors of a device."""
        supported = supported_devices(dist.get_backend_config())
        if device.type in supported:
            return device
        own = PartialState().device
        return own if own.type in supported else torch.device("cpu")

    @staticmethod
    def _on(device: torch.device, phases: Phases) -> Phases:
        mean = yield from phases
        return mean.to(device)

    def _mean(self, sent: Tensor) -> Phases:
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        self.bytes_sent += 2 * sent.nbytes * (self.size - 1) // self.size
        yield
        yield
        work.wait()
        return sent.div_(self.size)

    def _mean_as_int8(self, values: Tensor) -> Phases:
        """Sends each rank its part of the values of all others, and then the means of the parts to all."""
        padding = -values.numel() % (self.size * BLOCK)
        padded = torch.nn.functional.pad(values, (0, padding)).view(self.size, -1)
        sent = to_int8(padded)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        self.bytes_sent += sent.nbytes * (self.size - 1) // self.size
        yield
        work.wait()
        part = from_int8(received[0], values.dtype)
        for row in received[1:]:
            part += from_int8(row, values.dtype)
        own = to_int8(part.div_(self.size)[None])
        joined = torch.empty_like(sent)
        work = all_gather_flat(joined, own, group=self._group, async_op=True)
        self.bytes_sent += own.nbytes * (self.size - 1)
        yield
        work.wait()
        return from_int8(joined, values.dtype).view(-1)[: values.numel()]


def to_int8(rows: Tensor) -> Tensor:
    """Returns rows of a matrix as bytes, with a float32 scale after the int8 values of each block.

    Args:
        rows: Matrix whose number of columns is a multiple of `BLOCK`.
    """
    blocks = rows.view(len(rows), -1, BLOCK).float()
    scales = blocks.abs().amax(2, keepdim=True) / 127
    packed = blocks.new_empty((*blocks.shape[:2], BLOCK + _SCALE_BYTES), dtype=torch.uint8)
    divisors = torch.where(scales == 0, 1, scales)
    packed[..., :BLOCK] = (blocks / divisors).round_().to(torch.int8).view(torch.uint8)
    packed[..., BLOCK:] = scales.view(torch.uint8)
    return packed.view(len(rows), -1)


def from_int8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of rows that `to_int8` has returned, or of one row."""
    blocks = packed.view(-1, BLOCK + _SCALE_BYTES)
    scales = blocks[:, BLOCK:].contiguous().view(torch.float32)
    values = blocks[:, :BLOCK].view(torch.int8) * scales
    return values.to(dtype).view(*packed.shape[:-1], -1)
