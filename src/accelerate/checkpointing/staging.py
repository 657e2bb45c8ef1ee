"""Memory and thread of saves in the background.

`Checkpoints` in `saving.py` copies the content of all files with `StagingMemory`, and `BackgroundSave` writes
the copies while the run trains.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelerate.checkpointing.parts import Payload
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import iterate_tensors

logger = get_logger(__name__)


class StagingMemory:
    """CPU memory for a copy of all tensors of a checkpoint, reused by the next save.

    The first save allocates it, which takes several times as long as a copy. Memory for tensors of an
    accelerator is pinned, so that they are copied without synchronization between them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def stage(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Copies the content of files to CPU memory, where it is valid until the next call."""
        before, self._buffers = self._buffers, {}
        staged: dict[tuple[Any, ...], Tensor] = {}
        tensors = {
            (payload.name, number): tensor
            for payload in payloads
            for number, tensor in enumerate(iterate_tensors(payload.content))
        }

        def copy_of(key: tuple[str, int], tensor: Tensor) -> Tensor:
            if not of_device(tensor.device).is_addressable:
                return tensor.cpu()
            if tensor.layout != torch.strided or tensor.is_quantized:
                return tensor.cpu().clone()
            identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and identity in staged:
                return staged[identity]  # shared tensors stay shared
            buffer = before.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
            buffer.copy_(tensor, non_blocking=True)
            self._buffers[key] = staged[identity] = buffer
            return buffer

        # `deepcopy` takes the copies by the identities of the tensors
        copies = {id(tensor): copy_of(key, tensor.detach()) for key, tensor in tensors.items()}
        for device in {key[0] for key in staged if not of_device(key[0]).is_host}:
            torch.get_device_module(device).synchronize(device)
        return [replace(payload, content=copy.deepcopy(payload.content, copies)) for payload in payloads]


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
