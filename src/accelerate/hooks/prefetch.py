"""Load the weights of the next block while the current one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerate.devices import hardware_table, of_device

if TYPE_CHECKING:
    from accelerate.hooks.align import AlignDevicesHook as Block

PAGE = 4096


class Transfer:
    """How a thread loads weights on the CPU: it maps them from their files, and reads each page."""

    def fetch(self, block: Block) -> Any:
        """Return weights, or None where there is no room for them; called in a thread of its own."""
        weights = block.fetch()
        for weight in weights:
            if weight.is_cpu and weight.is_contiguous():
                weight.reshape(-1).view(torch.uint8)[::PAGE].sum()  # else the block would wait for each page
        return weights

    def receive(self, fetched: Any) -> Any:
        """Return the weights that `fetch` loaded, ready for the thread that computes."""
        return fetched


class StreamTransfer(Transfer):
    """How a thread loads weights to an accelerator: from pinned memory, over a stream of its own."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self.module = module
        self.stream = module.Stream(device=device)

    def fetch(self, block: Block) -> Any:
        if not self._has_room(block.count_bytes()):
            return None
        try:
            with self.module.stream(self.stream):
                weights = block.fetch(non_blocking=True)
                return weights, self.stream.record_event()
        except torch.OutOfMemoryError:
            return None  # the block loads them itself, when the one before is freed

    def receive(self, fetched: Any) -> Any:
        weights, arrived = fetched
        current = self.module.current_stream(self.device)
        current.wait_event(arrived)
        for weight in weights:
            if weight.device == self.device:
                weight.record_stream(current)  # their memory is not used again before the block is done
        return weights

    def _has_room(self, needed: int) -> bool:
        free = self.module.mem_get_info(self.device)[0]
        held = self.module.memory_reserved(self.device) - self.module.memory_allocated(self.device)
        return bool(free + held >= needed)


def transfer_to(device: torch.device) -> Transfer:
    """Return the transfer to a device: over a stream where its torch module has them."""
    backend = of_device(device)
    if backend.is_host or device.type == "meta":
        return Transfer()
    module = hardware_table.named(device.type).torch_module()
    return StreamTransfer(device, module) if hasattr(module, "Stream") else Transfer()


class Prefetcher:
    """Load the weights of a model's blocks, one block ahead.

    It records which block follows which. While one computes, a thread loads the weights of the one that
    followed it before; so there are never more than two on the device. Another order than before is slower,
    and becomes the one that is expected.
    """

    def __init__(
        self, device: torch.device, transfer: Callable[[torch.device], Transfer] = transfer_to
    ) -> None:
        self.device = device
        self._make_transfer = transfer
        self._transfer: Transfer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._following: dict[int, Block] = {}
        self._last: Block | None = None
        self._coming: tuple[Block, Future[Any]] | None = None

    def __reduce__(self) -> Any:
        return Prefetcher, (self.device, self._make_transfer)  # a copy of the model begins anew

    def take(self, block: Block) -> list[Tensor]:
        """Return the weights of a block, and prefetch those of the one that followed it before."""
        weights = self._claim(block)
        if weights is None:
            weights = block.fetch()
        if self._last is not None:
            self._following[id(self._last)] = block
        self._last = block
        following = self._following.get(id(block))
        if following is not None and following is not block:
            self._prefetch(following)
        return weights

    def _claim(self, block: Block) -> list[Tensor] | None:
        """Return the prefetched weights, if they are those of this block."""
        if self._coming is None or self._transfer is None:
            return None
        expected, coming = self._coming
        self._coming = None
        if expected is not block:
            wait([coming])  # else three blocks would be on the device
            return None
        fetched = coming.result()
        return None if fetched is None else self._transfer.receive(fetched)

    def _prefetch(self, block: Block) -> None:
        if self._thread is None or self._transfer is None:
            self._transfer = self._make_transfer(self.device)
            self._thread = ThreadPoolExecutor(1, "accelerate-prefetch")  # ends when this object does
        self._coming = block, self._thread.submit(self._transfer.fetch, block)
