"""Reader that reads the items of an iterator ahead in a thread, and a detector of random draws.

`DataLoaderDispatcher` reads through a `ReadAhead` on rank 0, unless its dataset draws random numbers.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from accelerate import rng
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.state import services

MESSAGE_BYTES = 256 * 1024
"""Size up to which small items are taken together, in bytes."""
LINGER = 0.002
"""Time to wait for more items that are read fast, so that they can be taken together, in seconds."""
FAST = 0.0005
"""Time between two items that are read fast, in seconds."""
_DEPTH = 2
"""Full messages, or single items larger than one message, that are read ahead."""
_MOST_ITEMS = 64
_JOIN_TIMEOUT = 5.0
"""Time that the end of a pass waits for a running read, in seconds."""

logger = get_logger(__name__)


class RandomDrawDetector:
    """Detector of random numbers that reading draws from the generators of this process.

    Reading that draws random numbers has to stay in the thread that trains. In another thread the order of
    the draws would be random, and no run could be reproduced.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None

    def start(self) -> dict[str, Any]:
        """Captures the generators, and returns their states."""
        self._before = rng.capture_on_cpu()
        return self._before

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches, and captures the generators after the first one, which also starts the sampler."""
        for batch in batches:
            self.start()
            yield batch
            break
        yield from batches

    def has_drawn(self) -> bool:
        """Returns whether the generators have changed since they were captured."""
        if self._before is None:
            return False
        before, now = self._before, rng.capture_on_cpu()
        return not (
            before["python"] == now["python"]
            and all(map(np.array_equal, before["numpy"], now["numpy"]))
            and torch.equal(before["torch"], now["torch"])
        )


class ReadAhead:
    """Reader of the items of an iterator that reads in a thread while the caller uses earlier items.

    The thread ends with the items, at `close`, and at the exit of the interpreter.

    Args:
        items: The items, each with a `size` in bytes.
        stays: Called after the first item, which is read in the thread of the caller. If it returns True, all
            other items are read in that thread, too.
        enter: Called once in the reading thread before it reads.
    """

    def __init__(
        self, items: Iterator[Any], stays: Callable[[], bool], enter: Callable[[], object] | None = None
    ) -> None:
        self._items = items
        self._stays: Callable[[], bool] | None = stays
        self._enter = enter
        self._read: deque[Any] = deque()
        self._size = 0
        self._pace = 0.0
        self._wanted = 0
        self._is_over = self._is_closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.thread: threading.Thread | None = None  # None while the caller's thread reads
        self.takes = 0
        self._pid = os.getpid()

    def take(self) -> list[Any]:
        """Returns the items that were read, at least one, and none at the end.

        Items that are read fast are returned together, up to `MESSAGE_BYTES`. An exception of the iterator is
        raised after the items before it.
        """
        self.takes += 1
        if self.thread is None:
            item = next(self._items, None)
            if item is not None and self._stays is not None and not self._stays():
                self._start()
            self._stays = None
            return [] if item is None else [item]
        with self._changed:
            self._wait_for(1, None)
            if not self._is_over and self._size < MESSAGE_BYTES and self._pace < FAST:
                self._wait_for(MESSAGE_BYTES, LINGER)
            if not self._read and self._error is not None:
                raise self._error
            taken: list[Any] = []
            size = 0
            while self._read and (not taken or size + self._read[0].size <= MESSAGE_BYTES):
                taken.append(self._read.popleft())
                size += taken[-1].size
            self._size -= size
            self._changed.notify_all()
            return taken

    def close(self) -> None:
        """Ends the thread, and drops the items that were not taken."""
        if os.getpid() != self._pid:  # a fork has no thread, and its copy of the lock may be held
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        thread = self.thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_JOIN_TIMEOUT)
        if thread.is_alive():
            logger.warning(
                "The dataset of a dispatched loader is still reading samples that are no longer used. Its "
                "thread ends when the read returns."
            )

    def _wait_for(self, size: int, timeout: float | None) -> None:
        """Waits, with the lock held, for items of this size together or for the last one."""
        self._wanted = size
        self._changed.wait_for(self._is_enough, timeout)
        self._wanted = 0

    def _is_enough(self) -> bool:
        if self._is_over:
            return True
        return bool(self._read) and (self._size >= self._wanted or len(self._read) >= _MOST_ITEMS)

    def _start(self) -> None:
        modes = _torch_modes(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()
        )
        self.thread = threading.Thread(
            target=copy_context().run, args=(self._run, modes), name="accelerate-read-ahead", daemon=True
        )
        services.of_process(_OpenReaders).add(self)
        self.thread.start()

    def _run(self, modes: AbstractContextManager[None]) -> None:
        torch.set_num_threads(1)  # of this thread: copying must not slow down training
        error: BaseException | None = None
        try:
            with modes:
                if self._enter is not None:
                    self._enter()
                start = time.monotonic()
                for item in self._items:
                    self._keep(item, time.monotonic() - start)
                    if self._is_closed:
                        break
                    start = time.monotonic()
        except BaseException as caught:  # raised by `take`
            error = caught
        with self._changed:
            self._error, self._is_over = error, True
            self._changed.notify_all()

    def _keep(self, item: Any, pace: float) -> None:
        """Keeps an item until it is taken, and waits while there are too many."""
        with self._changed:
            self._pace = pace
            self._read.append(item)
            self._size += item.size
            if self._wanted and self._is_enough():
                self._changed.notify_all()
            if not self._has_room(_DEPTH):
                # It waits until half of the items are taken: waking up for each item takes more time.
                self._changed.wait_for(lambda: self._is_closed or self._has_room(1))

    def _has_room(self, messages: int) -> bool:
        items = len(self._read)
        return items < _DEPTH or (self._size < messages * MESSAGE_BYTES and items < messages * _MOST_ITEMS)


@contextmanager
def _torch_modes(grad: bool, inference: bool, device: torch.device) -> Iterator[None]:
    """Sets the modes that torch has for each thread, which a dataset that computes needs."""
    default_device = nullcontext() if of_device(device).is_host else device
    with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference), default_device:
        yield


class _OpenReaders(WeakSet[ReadAhead]):
    """Readers of this process whose threads are running."""


@atexit.register
def _close_all() -> None:
    """Closes all readers before the shutdown of the interpreter, which a running thread may crash."""
    for reader in list(services.of_process(_OpenReaders)):
        reader.close()
