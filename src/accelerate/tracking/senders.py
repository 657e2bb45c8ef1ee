"""How values reach a tracker: at once, or by a thread where its library makes the caller wait."""

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

CAPACITY = 1024  # calls that may wait; the next `log` blocks until there is room
IDLE_SECONDS = 2.0  # after which a thread without work ends
EXIT_SECONDS = 60.0  # how long the end of the program waits for calls in the queue


class Record(NamedTuple):
    """One call of `log`."""

    values: dict[str, Any]
    step: int | None
    arguments: dict[str, Any]


class Sender:
    """Sends values to a started tracker at once."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker

    def log(self, record: Record) -> None:
        self.tracker.log(record.values, step=record.step, **record.arguments)

    def wait(self) -> None:
        """Return once all values have been sent."""

    def finish(self) -> None:
        """End the tracker."""
        self.tracker.finish()


class QueuedSender(Sender):
    """Sends values to a started tracker in a thread, in order; the thread ends when there is nothing to do.

    What the tracker raises is raised by the next `log`, or by `finish`. Values that still wait when the
    program ends are sent.
    """

    def __init__(self, tracker: GeneralTracker) -> None:
        super().__init__(tracker)
        self._queue: Queue[Record | None] = Queue(CAPACITY)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        atexit.register(self._wait_at_exit)  # before what the library registered earlier

    def log(self, record: Record) -> None:
        """Take a copy of the values, to be sent later; raise what the tracker raised on earlier ones."""
        self._raise_error()
        self._queue.put(record._replace(values=take_snapshot(record.values)))
        with self._starting:
            if self._thread is None:
                name = f"log-{self.tracker.name}"
                self._thread = threading.Thread(target=self._send_all, name=name, daemon=True)
                self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Return once all values have been sent, or after so many seconds."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def finish(self) -> None:
        """Wait, end the tracker, and raise what it raised on earlier values."""
        self.wait()
        with self._starting:
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
            except Exception as error:  # raised where the user's program can see it
                self._error = self._error or error
            self._queue.task_done()

    def _next(self) -> Record | None:
        while True:
            try:
                record = self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._starting:
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
                f"{self.tracker.name} did not take all values: {self._error!r}", main_process_only=False
            )


class Senders:
    """The sender of each tracker, made when it is first asked for."""

    def __init__(self) -> None:
        self._senders: dict[int, Sender] = {}

    def of(self, tracker: GeneralTracker) -> Sender:
        if id(tracker) not in self._senders:
            works_here = not tracker.main_process_only or PartialState().is_main_process
            queued = getattr(tracker, "blocks", False) and works_here
            self._senders[id(tracker)] = QueuedSender(tracker) if queued else Sender(tracker)
        return self._senders[id(tracker)]

    def wait(self) -> None:
        """Return once all values of all trackers have been sent."""
        for sender in self._senders.values():
            sender.wait()


@dataclass(frozen=True)
class Snapshot:
    """A copy of a tensor of an accelerator, on that accelerator; `wait` returns once the copy is complete."""

    tensor: torch.Tensor
    wait: Callable[[], None]


def take_snapshot(value: Any) -> Any:
    """Return a copy that later changes of tensors, arrays, lists, tuples and dictionaries do not reach.

    A tensor of an accelerator becomes a `Snapshot`, so that nothing waits for the device. Other objects are
    the same in the copy.
    """
    return _apply(_copy, value)


def read_snapshot(value: Any) -> Any:
    """Return what `take_snapshot` copied, with every tensor on the CPU."""
    return _apply(_read, value)


def _apply(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _apply(function, item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_apply(function, item) for item in value)
    return function(value)


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    if tensor.is_cpu:
        return tensor.clone()
    if not of_device(tensor.device).has_streams:  # copies follow no order: the value is read now
        return tensor.cpu()
    copy = tensor.clone()
    ready = getattr(torch, tensor.device.type).current_stream(tensor.device).record_event()
    return Snapshot(copy, ready.synchronize)


def _read(value: Any) -> Any:
    if not isinstance(value, Snapshot):
        return value
    value.wait()
    return value.tensor.cpu()
