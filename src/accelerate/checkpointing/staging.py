"""Checkpoints of one run, with the hooks of the user, and its saves in the background.

`Checkpoints` copies the content of all files with `StagingMemory`, and `BackgroundSave` writes the copies
while the run trains.
"""

from __future__ import annotations

import copy
import datetime
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from accelerate.base import progress_bar, size_of
from accelerate.checkpointing.parts import Payload
from accelerate.checkpointing.saving import Request, Saver
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import iterate_tensors
from accelerate.ops import current_transport, open_consensus
from accelerate.state import Consensus, process_group, services

logger = get_logger(__name__)

STORE_TIMEOUT = datetime.timedelta(minutes=5)
"""Timeout for one store request."""
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


class Checkpoints:
    """Hooks, background save and timeout of the checkpoints of one run.

    Args:
        timeout: Timeout in seconds for all ranks to call `save_state` or `load_state`.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        # called before a save with models, weights and folder
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        # called before a load with models and folder
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @cached_property
    def _memory(self) -> StagingMemory:
        return StagingMemory()

    @property
    def consensus(self) -> Consensus:
        """Consensus of the ranks, which all runs of this process use."""
        return services.get(Consensus, _open_consensus)

    @property
    def background(self) -> BackgroundSave:
        """Save in the background, which all runs of this process use, because they share the consensus."""
        return services.get(BackgroundSave, BackgroundSave)

    @staticmethod
    def add_hook(hooks: OrderedDict[int, Any], hook: Callable[..., Any]) -> RemovableHandle:
        """Appends a hook, and returns a handle that removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def begin(self, request: Request) -> Saver:
        """Creates the staging folder, on all ranks, and returns its saver."""
        saver = Saver(self.consensus)
        saver.begin(request)
        return saver

    def write(self, saver: Saver, payloads: Sequence[Payload], *, blocking: bool) -> None:
        """Writes and commits a checkpoint, or copies all content and starts the save in the background.

        Called on all ranks.
        """
        if not blocking and not self.consensus.is_threaded:
            logger.warning_once("This run has no store to agree over in the background: saves block.")
            blocking = True
        if blocking:
            folder = saver.staging.folder
            task = f"Saving {saver.staging.request.target.name}"
            with progress_bar(task, written=lambda: size_of(folder.rglob("*"))):
                saver.write(payloads)
                saver.commit()
            return
        self.background.start(saver.stage(payloads, self._memory))


def _open_consensus() -> Consensus:
    # All ranks open theirs in the same order. The store may still have values from before a reset.
    purpose = f"checkpoints/{services.next_number('checkpoints')}"
    consensus = open_consensus(current_transport(), process_group.connect_channel(purpose, STORE_TIMEOUT))
    return services.put(Consensus, consensus, close=_close_consensus)


def _close_consensus() -> None:
    consensus = services.remove(Consensus)
    if consensus is not None:
        consensus.close(waits=not process_group.failed())
