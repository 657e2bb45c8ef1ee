"""What the saves of one run share: how ranks agree, staged copies, the thread that writes, hooks."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelerate.checkpointing import retention, saving
from accelerate.checkpointing.part import Payload
from accelerate.checkpointing.saving import Site
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import honor_type
from accelerate.ops import current_transport, open_consensus
from accelerate.state import Consensus, rendezvous, services

logger = get_logger(__name__)

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


STORE_TIMEOUT = timedelta(minutes=5)
"""How long one request to the store may take."""


class Session:
    """The checkpoints of one run.

    Args:
        patience: seconds that the ranks have to come together.

    Attributes:
        save_hooks: called with models, weights and folder before a save.
        load_hooks: called with models and folder before a load.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._staging = StagingArea()

    @property
    def consensus(self) -> Consensus:
        """How the ranks agree; every session of a process counts their decisions together."""
        return services.get(Consensus, _open_consensus)

    @property
    def background(self) -> Background:
        """What writes; the sessions of a process take turns in it, because they agree over one consensus."""
        return services.get(Background, Background)

    @staticmethod
    def add_hook(hooks: OrderedDict[int, Any], hook: Callable[..., Any]) -> RemovableHandle:
        """Append a hook; the handle takes it away again."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def choose_number(self, parent: Path, wanted: int) -> int:
        """Return the number of the next checkpoint: the wanted one, or the next one above all that exist.

        Args:
            wanted: the number that is due; that of rank 0 counts.
        """

        def choose(wanted_numbers: Sequence[int]) -> int:
            taken = retention.taken_numbers(parent)
            return wanted_numbers[0] if wanted_numbers[0] not in taken else max(taken) + 1

        number = int(self.consensus.decide(saving.CALL, wanted, choose, self.patience))
        if number != wanted:
            logger.warning(
                f"{parent} holds a checkpoint {wanted} already: this run goes on with number {number}. "
                "A project folder for each run keeps them apart."
            )
        return number

    def prepare_write(
        self, site: Site, payloads: Sequence[Payload], *, blocking: bool
    ) -> Callable[[], object]:
        """Return what writes and commits, at once or in the background; called on all ranks.

        Args:
            blocking: return only when the checkpoint is committed.
        """
        if not blocking and not self.consensus.is_threaded:
            logger.warning_once("This run has no store to agree over in the background: saves block.")
            blocking = True
        if blocking:
            return partial(saving.write, site, payloads)
        staged = self._staging.stage(payloads)
        return partial(self.background.start, partial(saving.write, site, staged, threads=1))


class Background:
    """At most one job at a time.

    The thread is no daemon: the interpreter waits for it before it ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, job: Callable[[], Any]) -> None:
        """Run a job in a thread, after the one before has ended.

        Raises:
            Exception: what the job before has raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="accelerate-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when no job is running any more.

        Raises:
            Exception: what the last job has raised; once.
        """
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


class StagingArea:
    """Memory for one copy of everything that is saved; kept from one save to the next.

    Fresh memory costs several times as much as the copying into it, so only the first save pays for it.
    Memory for tensors of an accelerator is pinned: they are copied without a stop in between.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def stage(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Copy the content of files; returns when all of it is in CPU memory.

        Returns:
            The same with copies. They hold until the next call.
        """
        before, self._buffers = self._buffers, {}
        copied: dict[tuple[Any, ...], Tensor] = {}
        staged = [
            replace(payload, content=self._copy(payload.content, (payload.name,), before, copied))
            for payload in payloads
        ]
        for device in {key[0] for key in copied if not of_device(key[0]).is_host}:
            torch.get_device_module(device).synchronize(device)
        return staged

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    def _copy(self, value: Any, path: tuple[Any, ...], before: Any, copied: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), path, before, copied)
        if isinstance(value, Mapping):
            items = {key: self._copy(item, (*path, key), before, copied) for key, item in value.items()}
            return items if type(value) is dict else _like(value, items)
        if isinstance(value, (list, tuple)):
            return honor_type(
                value, (self._copy(item, (*path, index), before, copied) for index, item in enumerate(value))
            )
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, path: tuple[Any, ...], before: Any, copied: Any) -> Tensor:
        if not of_device(tensor.device).is_addressable:
            return tensor.cpu()
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in copied:
            shared: Tensor = copied[identity]  # shared tensors stay shared
            return shared
        buffer: Tensor | None = before.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
        buffer.copy_(tensor, non_blocking=True)
        self._buffers[path] = copied[identity] = buffer
        return buffer


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    twin: Any = copy.copy(value)
    for key, item in items.items():  # `update` of a Counter would add
        twin[key] = item
    return twin


def _open_consensus() -> Consensus:
    # All ranks open theirs in the same order; the store may still hold values from before a reset.
    purpose = f"checkpoints/{services.next_number('checkpoints')}"
    return open_consensus(current_transport(), rendezvous.connect_channel(purpose, STORE_TIMEOUT))
