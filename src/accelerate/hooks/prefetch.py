"""Prefetching of the offloaded weights of the next block while the current block computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerate.base import populate_pages
from accelerate.weights import PinnedBuffers, stream_module

if TYPE_CHECKING:
    from accelerate.hooks.align import AlignDevicesHook

PAGE = 4096
Copy = Callable[[Tensor, torch.device, torch.dtype], Tensor]
"""Function that copies a tensor to a device and converts it to a dtype, as `Tensor.to` does."""


class Transfer:
    """Prefetch of offloaded weights on the CPU, which maps them from their files with all pages."""

    def fetch(self, block: AlignDevicesHook) -> Any:
        """Returns the weights of a block, or None if they do not fit on the device.

        Called in a separate thread.
        """
        weights = block.fetch()
        for weight in weights:
            if not weight.is_cpu or not weight.is_contiguous():
                continue
            # Otherwise the forward would wait for each page.
            if not populate_pages(weight.data_ptr(), weight.nbytes):
                weight.reshape(-1).view(torch.uint8)[::PAGE].sum()
        return weights

    def receive(self, fetched: object) -> Any:
        """Returns the weights that `fetch` loaded, ready for use in the current thread."""
        return fetched


class StreamTransfer(Transfer):
    """Prefetch of offloaded weights to an accelerator, from pinned memory over a separate stream."""

    def __init__(self, device: torch.device, module: ModuleType) -> None:
        self.device = device
        self.module = module
        self.stream = module.Stream(device=device)
        self._buffers = PinnedBuffers()

    def fetch(self, block: AlignDevicesHook) -> Any:
        if not self._has_room(block.count_bytes()):
            return None
        try:
            with self.module.stream(self.stream):
                weights = block.fetch(self._copy)
                return weights, self.stream.record_event()
        except torch.OutOfMemoryError:
            return None  # the hook loads them after the previous block is freed

    def receive(self, fetched: Any) -> Any:
        weights, copied = fetched
        current = self.module.current_stream(self.device)
        current.wait_event(copied)
        for weight in weights:
            if weight.device == self.device:
                weight.record_stream(current)  # their memory is not reused before the block is done
        return weights

    def _copy(self, values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Copies a tensor without synchronization of the device, and may return before the copy is complete.

        Tensors in memory that is not pinned are copied in chunks through pinned memory.
        """
        if not self._buffers.accepts(values, device):
            return values.to(device, dtype, non_blocking=True)
        return self._buffers.to(values, device).to(dtype)

    def _has_room(self, num_bytes: int) -> bool:
        free = self.module.mem_get_info(self.device)[0]
        cached = self.module.memory_reserved(self.device) - self.module.memory_allocated(self.device)
        return bool(free + cached >= num_bytes)


def transfer_to(device: torch.device) -> Transfer:
    """Returns the transfer to a device, over a stream where its torch module supports streams."""
    module = stream_module(device)
    return Transfer() if module is None else StreamTransfer(device, module)


class Prefetcher:
    """Prefetcher that loads the weights of the next block while the current one computes.

    It records the order of the blocks. While one computes, a thread loads the weights of the block that
    followed it last time. So there are never more than two blocks on the device. A change of the order is
    slower once, and the new order is recorded.
    """

    def __init__(
        self, device: torch.device, transfer: Callable[[torch.device], Transfer] = transfer_to
    ) -> None:
        self.device = device
        self._make_transfer = transfer
        self._successors: dict[int, AlignDevicesHook] = {}
        self._last: AlignDevicesHook | None = None
        self._pending: tuple[AlignDevicesHook, Future[Any]] | None = None

    def __reduce__(self) -> Any:
        # a copy of the model starts without a recorded order
        return Prefetcher, (self.device, self._make_transfer)

    @cached_property
    def _worker(self) -> tuple[Transfer, ThreadPoolExecutor]:
        # The thread ends when this object is deleted.
        return self._make_transfer(self.device), ThreadPoolExecutor(1, "accelerate-prefetch")

    def take(self, block: AlignDevicesHook) -> list[Tensor]:
        """Returns the weights of a block, and prefetches those of its successor."""
        weights = self._claim(block)
        if weights is None:
            weights = block.fetch()
        if self._last is not None:
            self._successors[id(self._last)] = block
        self._last = block
        successor = self._successors.get(id(block))
        if successor is not None and successor is not block:
            transfer, thread = self._worker
            self._pending = successor, thread.submit(transfer.fetch, successor)
        return weights

    def _claim(self, block: AlignDevicesHook) -> list[Tensor] | None:
        """Returns the prefetched weights if they are those of this block."""
        if self._pending is None:
            return None
        expected, future = self._pending
        self._pending = None
        if expected is not block:
            wait([future])  # otherwise three blocks could be on the device
            return None
        fetched = future.result()
        return None if fetched is None else self._worker[0].receive(fetched)
