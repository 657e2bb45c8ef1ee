"""Senders that pass values to a tracker, directly or in a thread if its library blocks the caller."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.tracking.base import GeneralTracker

logger = get_logger(__name__)

CAPACITY = 1024  # maximum number of queued calls, after which `log` blocks
IDLE_SECONDS = 2.0  # idle time after which the thread ends
EXIT_SECONDS = 60.0  # timeout for queued calls when the program ends


class Record(NamedTuple):
    """Arguments of one call of `log`."""

    values: dict[str, Any]
    step: int | None
    arguments: dict[str, Any]


class Sender:
    """Sender that passes values directly to a started tracker."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker

    def log(self, record: Record) -> None:
        self.tracker.log(record.values, step=record.step, **record.arguments)

    def wait(self) -> None:
        """Waits until all values have been sent."""

    def finish(self) -> None:
        """Ends the tracker."""
        self.tracker.finish()


class QueuedSender(Sender):
    """Sender that passes values to a started tracker in a thread, in order.

    The thread ends when it is idle. An error of the tracker is raised by the next `log`, or by `finish`.
    Values that are queued when the program ends are sent.
    """

    def __init__(self, tracker: GeneralTracker) -> None:
        super().__init__(tracker)
        self._queue: Queue[Record | None] = Queue(CAPACITY)
        self._thread_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        atexit.register(self._wait_at_exit)  # runs before functions that the library registered earlier

    def log(self, record: Record) -> None:
        """Queues a copy of the values, and raises the error of an earlier call."""
        self._raise_error()
        self._queue.put(record._replace(values=take_snapshot(record.values)))
        with self._thread_lock:
            if self._thread is None:
                name = f"log-{self.tracker.name}"
                self._thread = threading.Thread(target=self._send_all, name=name, daemon=True)
                self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all values have been sent, or until the timeout in seconds."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def finish(self) -> None:
        """Waits for all values, ends the tracker, and raises the error of an earlier call."""
        self.wait()
        with self._thread_lock:
            if self._thread is not None:
                self._queue.put(None)  # ends the thread
                self._thread = None
        atexit.unregister(self._wait_at_exit)
        self.tracker.finish()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _send_all(self) -> None:
        while (record := self._next()) is not None:
            try:
                self.tracker.log(read_snapshot(record.values), step=record.step, **record.arguments)
            except Exception as error:  # raised by the next call in the thread of the user
                self._error = self._error or error
            self._queue.task_done()

    def _next(self) -> Record | None:
        while True:
            try:
                record = self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._thread_lock:
                    if self._queue.empty():
                        self._thread = None
                        return None
                continue
            if record is None:
                self._queue.task_done()
            return record

    def _wait_at_exit(self) -> None:
        self.wait(EXIT_SECONDS)
        if self._queue.unfinished_tasks:
            logger.warning(
                f"{self._queue.unfinished_tasks} calls of log did not reach {self.tracker.name} within "
                f"{EXIT_SECONDS} s. Call end_training() to wait longer.",
                main_process_only=False,
            )
        if self._error is not None:
            logger.warning(
                f"{self.tracker.name} did not log all values: {self._error!r}", main_process_only=False
            )


class Senders:
    """Senders of all trackers, each created on first use."""

    def __init__(self) -> None:
        self._senders: dict[int, Sender] = {}

    def of(self, tracker: GeneralTracker) -> Sender:
        if id(tracker) not in self._senders:
            is_active = not tracker.main_process_only or PartialState().is_main_process
            queued = getattr(tracker, "blocks", False) and is_active
            self._senders[id(tracker)] = QueuedSender(tracker) if queued else Sender(tracker)
        return self._senders[id(tracker)]

    def wait(self) -> None:
        """Waits until all values of all trackers have been sent."""
        for sender in self._senders.values():
            sender.wait()


@dataclass(frozen=True)
class Snapshot:
    """Copy of an accelerator tensor on the same device, where `wait` waits until the copy is complete."""

    tensor: torch.Tensor
    wait: Callable[[], None]


def take_snapshot(value: object) -> Any:
    """Copies tensors, arrays, lists, tuples and dictionaries, so that later changes do not affect the copy.

    A tensor on an accelerator becomes a `Snapshot`, so that the device is not synchronized. Other objects are
    not copied.
    """
    return _apply(_copy, value)


def read_snapshot(value: object) -> Any:
    """Returns the values of `take_snapshot` with every tensor on the CPU."""
    return _apply(_read, value)


def _apply(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _apply(function, item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_apply(function, item) for item in value)
    return function(value)


def _copy(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    if tensor.is_cpu:
        return tensor.clone()
    # copies are not ordered by streams, so the value is read now
    if not of_device(tensor.device).has_streams:
        return tensor.cpu()
    copy = tensor.clone()
    ready = getattr(torch, tensor.device.type).current_stream(tensor.device).record_event()
    return Snapshot(copy, ready.synchronize)


def _read(value: object) -> Any:
    if not isinstance(value, Snapshot):
        return value
    value.wait()
    return value.tensor.cpu()
