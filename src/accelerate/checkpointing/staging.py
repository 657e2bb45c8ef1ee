"""Memory and thread of saves in the background.

`Checkpoints` in `saving.py` copies the content of all files with `StagingMemory`, and `BackgroundSave` writes
the copies while the run trains.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from accelerate.checkpointing.parts import Payload
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import iterate_tensors

logger = get_logger(__name__)

_IMMUTABLE = frozenset((str, int, float, bool, type(None)))


class StagingMemory:
    """CPU memory for a copy of all tensors of a checkpoint, one buffer for each dtype.

    The next save uses the buffers again. The first save allocates them, which takes several times as long as
    a copy. Buffers for tensors of an accelerator are pinned, so that they are copied without synchronization
    between them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, bool], Tensor] = {}
        self._layout: list[tuple[torch.dtype, bool, torch.Size]] = []
        self._parts: list[Tensor] = []  # of the buffers, one for each tensor of the layout

    def stage(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Copies the content of files to CPU memory, where it is valid until the next call."""
        backend_of = cache(of_device)  # of few devices
        copies: dict[int, Tensor] = {}  # by the identities of the tensors, as `deepcopy` takes them
        buffered: dict[tuple[Any, ...], list[Tensor]] = {}  # tensors of equal memory, which stay shared
        for tensor in iterate_tensors([payload.content for payload in payloads]):
            if not backend_of(tensor.device).is_addressable:
                copies[id(tensor)] = tensor.detach().cpu()
            elif tensor.layout != torch.strided or tensor.is_quantized:
                copies[id(tensor)] = tensor.detach().cpu().clone()
            else:
                memory = tensor.data_ptr() if tensor.numel() else len(buffered)
                key = (tensor.dtype, not tensor.is_cpu, tensor.device, memory, tensor.shape, tensor.stride())
                buffered.setdefault(key, []).append(tensor)
        sources = [tensors[0].detach() for tensors in buffered.values()]
        self._divide([(source.dtype, not source.is_cpu, source.shape) for source in sources])
        if sources:
            torch._foreach_copy_(self._parts, sources, non_blocking=True)
        for part, tensors in zip(self._parts, buffered.values(), strict=True):
            copies |= dict.fromkeys(map(id, tensors), part)
        staged = [replace(payload, content=_deep_copy(payload.content, copies)) for payload in payloads]
        for device in {source.device for source in sources}:  # they may still copy
            if not backend_of(device).is_host:
                torch.get_device_module(device).synchronize(device)
        return staged

    def _divide(self, layout: list[tuple[torch.dtype, bool, torch.Size]]) -> None:
        """Divides the buffers into one part for each tensor, unless the last save had the same layout."""
        if layout == self._layout:
            return
        self._layout, self._parts = layout, []
        self._allocate([((dtype, is_pinned), shape.numel()) for dtype, is_pinned, shape in layout])
        starts = dict.fromkeys(self._buffers, 0)
        for dtype, is_pinned, shape in layout:
            start = starts[dtype, is_pinned]
            starts[dtype, is_pinned] = end = start + shape.numel()
            # A storage of its own, because `torch.save` writes the whole storage of a tensor.
            storage = self._buffers[dtype, is_pinned].untyped_storage()[
                start * dtype.itemsize : end * dtype.itemsize
            ]
            self._parts.append(torch.empty(0, dtype=dtype).set_(storage).view(shape))

    def _allocate(self, parts: Sequence[tuple[tuple[torch.dtype, bool], int]]) -> None:
        """Replaces the buffers that are too small for the parts, and those that no part needs."""
        sizes: dict[tuple[torch.dtype, bool], int] = {}
        for key, size in parts:
            sizes[key] = sizes.get(key, 0) + size
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in sizes}
        for (dtype, is_pinned), size in sizes.items():
            buffer = self._buffers.pop((dtype, is_pinned), None)
            if buffer is None or buffer.numel() < size:
                buffer = torch.empty(size, dtype=dtype, pin_memory=is_pinned)
            self._buffers[dtype, is_pinned] = buffer


def _deep_copy(value: Any, copies: dict[int, Any]) -> Any:
    """Returns `copy.deepcopy(value, copies)`, which takes several times as long for plain containers."""
    kind = type(value)
    if kind is dict:
        return {key: _deep_copy(item, copies) for key, item in value.items()}
    if kind is list or kind is tuple:
        if _IMMUTABLE.issuperset(map(type, value)):  # such as the 625 integers of Python's random state
            return kind(value)
        return kind(_deep_copy(item, copies) for item in value)
    if kind in _IMMUTABLE:
        return value
    known = copies.get(id(value))
    return copy.deepcopy(value, copies) if known is None else known


class BackgroundSave:
    """At most one job in a thread, which is not a daemon, so the interpreter waits for it at exit."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, job: Callable[[], Any]) -> None:
        """Waits for the previous job, raises its error, and runs a job in a thread."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="accelerate-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the running job, and raises the error of the last job once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except Exception as error:  # raised again by wait()
            logger.error(f"A checkpoint was not saved: {error}", main_process_only=False)
            self._error = error
