"""Copies of tensors from the CPU to accelerators, in chunks through pinned memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.devices import of_device

NUM_BUFFERS, CHUNK_BYTES = 2, 16 * 2**20
"""Number and bytes of the buffers of pinned memory."""
STAGED_BYTES = 2**18
"""Bytes of the smallest tensor for which a copy through pinned memory is faster."""


class PinnedBuffers:
    """Buffers of pinned memory, through which tensors in other memory are copied to accelerators in chunks.

    The copy of a chunk to the device overlaps with the read of the next one by all threads of torch.
    """

    def __init__(self) -> None:
        self._buffers: deque[tuple[Tensor, Any]] = deque()  # with the events of their copies

    def to(self, source: Tensor, device: torch.device) -> Tensor:
        """Returns a copy of a tensor that `accepts` accepts on a device."""
        target = torch.empty_like(source, device=device)
        self.copy(target, source)
        return target

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a tensor, which may change afterwards, on the current stream of the device of the target.

        Other tensors than those of `accepts`, or of another layout or dtype, are copied by torch.
        """
        is_same = (source.dtype, source.shape) == (target.dtype, target.shape) and target.is_contiguous()
        if not is_same or not self.accepts(source, target.device):
            target.copy_(source)
            return
        stream = stream_module(target.device).current_stream(target.device)
        chunks, targets = (
            torch.split(each.detach().reshape(-1).view(torch.uint8), CHUNK_BYTES) for each in (source, target)
        )
        for chunk, on_device in zip(chunks, targets, strict=True):
            buffer = self._free_buffer()
            on_device.copy_(buffer[: chunk.numel()].copy_(chunk), non_blocking=True)
            self._buffers.append((buffer, stream.record_event()))

    @staticmethod
    def accepts(source: Tensor, device: torch.device) -> bool:
        """Returns whether a tensor is large and on the CPU, and the device has streams."""
        is_plain = type(source) in (Tensor, nn.Parameter) and source.is_cpu and source.is_contiguous()
        is_large = is_plain and source.nbytes >= STAGED_BYTES and not source.is_pinned()
        return is_large and stream_module(device) is not None

    def _free_buffer(self) -> Tensor:
        """Returns a new buffer, or the one whose copy began first after that copy is complete."""
        if len(self._buffers) < NUM_BUFFERS:
            return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        buffer, copied = self._buffers.popleft()
        copied.synchronize()
        return buffer


def stream_module(device: torch.device) -> Any:
    """Returns the torch module of a device, or None if its copies do not run in streams."""
    module = None if of_device(device).is_host else getattr(torch, device.type, None)
    return module if hasattr(module, "Stream") else None
