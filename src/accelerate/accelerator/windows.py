"""Windows of a loader: the micro-batches of one optimizer step at a time, their items counted beforehand.

The batches of a window are read, and their items summed over all ranks, while the last batch of the window
before is computed. What the loader says of a batch (is it the last one, which samples are real) is kept with
the batch and said again when it is used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate import data_loader, ops
from accelerate.accelerator.runtime import Runtime
from accelerate.accelerator.weighing import drop_gradients, exchange, factor_of, sum_items
from accelerate.base import StateError
from accelerate.logging import get_logger

logger = get_logger(__name__)

_PURPOSE = "accelerate.Accelerator.windows"
_END = object()

Count = Callable[[Any], Any]
"""The number of items of a batch."""

_Batches = deque[tuple[Any, data_loader.BatchMetadata]]
"""The batches of a window on this rank, each with what the loader says of it."""


class Windows:
    """The windows of one loader; each pass over this object is a pass over the loader."""

    def __init__(
        self, runtime: Runtime, loader: Any, models: Sequence[nn.Module], count: Count | None
    ) -> None:
        self._runtime = runtime
        self._loader = loader
        self._models = models
        self._count = count

    def __len__(self) -> int:
        """The number of windows in a pass; needs a loader that has a length."""
        return math.ceil(len(self._loader) / self._runtime.gradient_state.num_steps)

    def __iter__(self) -> Iterator[Window]:
        runtime = self._runtime
        _check_start(runtime)
        models = self._models or runtime.prepared.models
        reader = _Reader(runtime, self._loader, self._count)
        window: Window | None = None
        try:
            while (read := reader.take()) is not None:
                window = Window(runtime, models, reader, *read)
                yield window
                window.close()
        finally:
            if window is not None:  # left by an exception, this may be closed before the loop over the window
                window.close()
            reader.close()
            if runtime.weights is runtime.even_weights:
                runtime.gradient_state._set_sync_gradients(True)


class Window:
    """The micro-batches of one optimizer step, to be iterated once.

    Inside, `accelerator.backward` takes losses that sum over items. A window counts as a whole: when the loop
    over it is left before its last batch, its gradients are dropped and the optimizer does not step.

    Attributes:
        num_items: items in the batches of this window, over all ranks.
    """

    def __init__(
        self, runtime: Runtime, models: Sequence[nn.Module], reader: _Reader, batches: _Batches, total: float
    ) -> None:
        self.num_items: int | float = int(total) if total.is_integer() else total
        self._runtime = runtime
        self._models = models
        self._reader = reader
        self._batches = batches
        self._length = len(batches)
        self._factor = factor_of(total, runtime.strategy.replicas)
        self._is_begun = False

    def __len__(self) -> int:
        """The number of batches of this rank in this window."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:
            raise StateError("A window is iterated once: each batch is released when it is used.")
        self._is_begun = True
        runtime = self._runtime
        runtime.weights = self
        try:
            while self._batches:
                is_last = len(self._batches) == 1
                with exchange(runtime.gradient_state, is_last, self._models, runtime.strategy.no_sync):
                    yield self._next_batch()
        finally:
            self.close()

    def _next_batch(self) -> Any:
        batch, metadata = self._batches.popleft()
        is_last = not self._batches
        if is_last:
            self._reader.read_ahead()
        data_loader.set_batch_metadata(self._reader.loader, metadata)
        self._runtime.gradient_state._set_sync_gradients(is_last)
        return batch

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the part of `loss`, a sum over items of this rank, in the mean over all items."""
        return loss * self._factor

    def close(self) -> None:
        """End the window now; does nothing when it has ended."""
        runtime = self._runtime
        if self._batches:
            self._batches.clear()
            runtime.gradient_state._set_sync_gradients(False)
            if self._is_begun and runtime.strategy.holds_gradients:
                drop_gradients(self._models)
            elif self._is_begun:
                logger.warning(
                    "A window of windows() was left before its last batch, and its gradients are inside "
                    "the engine: they are added to those of the next window."
                )
        if runtime.weights is self:
            runtime.weights = runtime.even_weights


class _Reader:
    """Reads a loader by windows and agrees with the other ranks on each of them."""

    def __init__(self, runtime: Runtime, loader: Any, count: Count | None) -> None:
        self._runtime = runtime
        self._count = count
        self._outer = runtime.gradient_state.active_dataloader
        self._source = iter(loader)
        self.loader: Any = None
        self._latest: data_loader.BatchMetadata = {}
        self._ahead: tuple[_Batches, ops.Answer] | None = None
        self._goes_on = True

    def read_ahead(self) -> None:
        """Read the next window, and start to sum its items; nothing where that is done or none can follow."""
        if self._ahead is not None or not self._goes_on:
            return
        batches, more = self._read()
        length = len(batches)
        items = length if self._count is None else sum_items([self._count(batch) for batch, _ in batches])
        answer = ops.reduce_async(
            [items, float(bool(length)), float(more), length, length * length], "sum", _PURPOSE
        )
        self._ahead = batches, answer

    def take(self) -> tuple[_Batches, float] | None:
        """Return the batches of this rank and the items of all ranks in the next window; None at the end."""
        self.read_ahead()
        if self._ahead is None:
            return None
        (batches, answer), self._ahead = self._ahead, None
        items, present, more, length, squares = answer.wait()
        size = self._runtime.state.num_processes
        self._goes_on = more == size and present == size
        if present < size:
            if present:
                _warn_left_out(present, size)
            return None
        if more not in (0, size):
            _warn_left_out(more, size)
        self._check_rounds(length, squares, size)
        return batches, items

    def _read(self) -> tuple[_Batches, bool]:
        """Return the batches of a window, and whether others may follow."""
        batches: _Batches = deque()
        data_loader.set_batch_metadata(self.loader, self._latest)  # a loader counts on from what it says
        for _ in range(self._runtime.gradient_state.num_steps):
            batch = next(self._source, _END)
            if batch is _END:
                return batches, False
            if self.loader is None:
                active = self._runtime.gradient_state.active_dataloader
                self.loader = None if active is self._outer else active
            self._latest = data_loader.get_batch_metadata(self.loader)
            batches.append((batch, self._latest))
            if self.loader is not None and self.loader.end_of_dataloader:
                return batches, False
        return batches, True

    def _check_rounds(self, length: float, squares: float, size: int) -> None:
        sync_each_batch = self._runtime.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if sync_each_batch and length * length != size * squares:
            raise StateError(
                f"The processes have different numbers of batches in this window ({length:g} in all), and "
                "with sync_each_batch=True they exchange gradients after each of them. Use "
                "sync_each_batch=False, or a loader that gives all processes equally many (even_batches)."
            )

    def close(self) -> None:
        """End the pass over the loader, at its end or before."""
        if self._goes_on:
            getattr(self._source, "close", lambda: None)()
        else:
            next(self._source, None)


def _check_start(runtime: Runtime) -> None:
    if runtime.weights is not runtime.even_weights:
        raise StateError(
            "windows() was started inside a window of accumulate(num_items=...) or of another windows(). "
            "Let that one end first."
        )
    state = runtime.gradient_state
    if not state.sync_gradients:
        raise StateError(
            "windows() was started although accumulate() has begun a window that has not ended "
            "(sync_gradients is False). Let it end, or set accelerator.step = 0 and "
            "accelerator.sync_gradients = True and call optimizer.zero_grad() to give it up."
        )
    if not state.sync_with_dataloader:
        logger.warning_once(
            "windows() ends its last window with the loader: sync_with_dataloader=False has no effect on it."
        )


def _warn_left_out(having: float, size: int) -> None:
    logger.warning(
        f"windows() ends here on all processes: only {having:g} of {size} have further batches, and a "
        "process without any cannot take part in an exchange of gradients. What the others would still have "
        "had is left out; even_batches=True gives all processes equally many."
    )
