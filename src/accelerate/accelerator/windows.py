"""Iteration over a loader by windows, that is, the micro-batches of one optimizer step.

`Accelerator.windows` creates `Windows`. The batches of a window are read, and their items are summed over all
ranks, while the last batch of the window before is computed. The metadata of the loader for a batch (whether
it is the last one, which samples are padding) is kept with the batch, and restored when the batch is used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from accelerate import data_loader, ops
from accelerate.accelerator.accumulation import Accumulation, num_copies, sync_context
from accelerate.accelerator.weighting import factor_of, sum_items
from accelerate.base import StateError
from accelerate.logging import get_logger
from accelerate.state import run_observers, step_clock

logger = get_logger(__name__)

_END = object()

Count = Callable[[Any], Any]
"""Function that returns the number of items of a batch."""

_Batches: TypeAlias = "deque[tuple[Any, data_loader.BatchMetadata]]"
"""Batches of a window on this rank, each with its metadata."""


@dataclass(eq=False, repr=False)
class Windows:
    """Windows of a loader.

    Each iteration over this object is one over the loader.
    """

    _accumulation: Accumulation
    _loader: Any
    _models: Sequence[nn.Module]
    _count: Count | None

    def __len__(self) -> int:
        """Returns the number of windows of a loader that has a length."""
        num_steps = getattr(self._loader, "num_micro_batches", None) or self._accumulation.gradients.num_steps
        return math.ceil(len(self._loader) / num_steps)

    def __iter__(self) -> Iterator[Window]:
        accumulation = self._accumulation
        _check_start(accumulation)
        reader = _WindowReader(accumulation, self._loader, self._count)
        window: Window | None = None
        try:
            while (read := reader.take()) is not None:
                models = self._models or accumulation.prepared.models
                window = Window(accumulation, models, reader, *read)
                yield window
                window.close()
                run_observers().before_read(reader.loader)
        finally:
            if window is not None:  # after an exception the loop over the window may still be open
                window.close()
            reader.close()
            accumulation.gradients.follow(None)
            if accumulation.weighting is None:
                accumulation.gradients._set_sync_gradients(True)


class Window:
    """Micro-batches of one optimizer step, which are iterated once.

    Inside, `accelerator.backward` takes losses that are sums over items. If the loop is left before the last
    batch, the gradients of the window are removed and the optimizer does not step.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        models: Sequence[nn.Module],
        reader: _WindowReader,
        batches: _Batches,
        total: float,
    ) -> None:
        self.num_items: int | float = int(total) if total.is_integer() else total
        self._accumulation = accumulation
        self._models = models
        self._reader = reader
        self._batches = batches
        self._length = len(batches)
        self._factor = factor_of(total, accumulation.strategy.replicas)
        self._is_begun = self._has_loss = self._is_over = False

    def finish(self) -> None:
        """Does nothing, because the items are summed before the first batch."""

    @property
    def counts_items(self) -> bool:
        """True if losses are sums over items, and False if they are means over batches."""
        return self._reader.counts_items

    def __len__(self) -> int:
        """Returns the number of batches of this rank."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:
            raise StateError("A window is iterated once: each batch is released when it is used.")
        self._is_begun = True
        accumulation = self._accumulation
        accumulation.weighting = self
        try:
            while self._batches:
                is_last = len(self._batches) == 1
                with sync_context(accumulation, is_last, self._models):
                    yield self._next_batch()
        finally:
            self.close()
        if self.counts_items and not self._has_loss:  # such as after `list(window)`
            self._is_over, accumulation.weighting = True, self

    def _next_batch(self) -> Any:
        is_first = len(self._batches) == self._length
        batch, metadata = self._batches.popleft()
        self._accumulation.num_parts = 1
        is_last = not self._batches
        if is_last:
            if self._reader.counts_items:
                step_clock.items += self.num_items / num_copies(self._accumulation.strategy)
            self._reader.read_ahead()
        data_loader.set_batch_metadata(self._reader.loader, metadata)
        self._accumulation.gradients.follow(self._reader.loader)
        self._accumulation.gradients._set_sync_gradients(is_last)
        if self._length > 1 or self._accumulation.has_held:
            self._accumulation.begin_window(self._models, is_first=is_first, is_last=is_last)
        return batch

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the part of a loss, a sum over items of this rank, in the mean over all items."""
        if self._is_over:
            raise StateError(
                "backward() was called after the last batch of a window whose items are counted, and only "
                "losses inside are divided by their number. Iterate over the window instead of list(window), "
                "and call backward() for each batch."
            )
        self._has_loss = True
        part = None if self._reader.counts_items else self._accumulation.step_part()
        return loss * (self._factor if part is None else part.weight)

    def close(self) -> None:
        """Ends the window, if it has not ended."""
        accumulation = self._accumulation
        if self._batches:
            self._batches.clear()
            accumulation.gradients._set_sync_gradients(False)
            if self._is_begun and accumulation.strategy.holds_gradients:
                accumulation.release(self._models)
                accumulation.drop_gradients_of(self._models)
            elif self._is_begun:
                logger.warning(
                    "A window of windows() was left before its last batch, and its gradients are inside "
                    "the engine: they are added to those of the next window."
                )
        if accumulation.weighting is self:
            accumulation.weighting = None


class _WindowReader:
    """Reader of a loader by windows, which end on all ranks together."""

    def __init__(self, accumulation: Accumulation, loader: Any, count: Count | None) -> None:
        self._accumulation, self._gradients = accumulation, accumulation.gradients
        self._count = count
        self.counts_items = count is not None
        self._outer = accumulation.gradients.active_dataloader
        self._source = iter(loader)
        self.loader: Any = None
        self._latest: data_loader.BatchMetadata = {}
        self._ahead: tuple[_Batches, ops.AsyncReduction] | None = None
        self._num_steps = 0  # as set when the window ahead was read
        self._returned: _Batches = deque()  # batches that are read, and not in a window yet
        self._goes_on = True

    def read_ahead(self) -> None:
        """Reads the next window and starts the sum of its items, unless that is done or no window follows."""
        if self._ahead is not None or not self._goes_on:
            return
        batches, more = self._read()
        length = len(batches)
        items = length if self._count is None else sum_items([self._count_items(*each) for each in batches])
        reduction = ops.reduce_async(
            [items, float(bool(length)), float(more), length, length * length],
            "sum",
            "accelerate.Accelerator.windows",
        )
        self._ahead = batches, reduction

    def _count_items(self, batch: object, metadata: data_loader.BatchMetadata) -> Any:
        part = metadata.get("step_part")
        if part is not None and not part.weight:  # the batch repeats a sample of another rank
            return 0
        assert self._count is not None
        return self._count(batch)

    def take(self) -> tuple[_Batches, float] | None:
        """Returns the batches of this rank and the items of all ranks in the next window, or None."""
        if self._ahead is not None and self._num_steps != self._gradients.num_steps:
            (batches, reduction), self._ahead = self._ahead, None
            reduction.wait()
            self._returned.extendleft(reversed(batches))
        self.read_ahead()
        if self._ahead is None:
            return None
        (batches, reduction), self._ahead = self._ahead, None
        items, present, more, length, squares = reduction.wait()
        size = ops.current_transport().size
        self._goes_on = more == size and present == size
        if present < size:
            if present:
                _warn_left_out(present, size)
            return None
        if more not in (0, size):
            _warn_left_out(more, size)
        sync_each_batch = self._gradients.plugin_kwargs.get("sync_each_batch", False)
        if sync_each_batch and length * length != size * squares:
            raise StateError(
                f"The processes have different numbers of batches in this window ({length:g} in all), and "
                "with sync_each_batch=True they exchange gradients after each of them. Use "
                "sync_each_batch=False, or a loader that gives all processes equally many (even_batches)."
            )
        return batches, items

    def _read(self) -> tuple[_Batches, bool]:
        """Returns the batches of a window, and whether another window may follow."""
        batches: _Batches = deque()
        self._num_steps = self._gradients.num_steps
        data_loader.set_batch_metadata(self.loader, self._latest)  # the loader continues its counts from here
        while True:
            if self._returned:
                batches.append(self._returned.popleft())
                data_loader.set_batch_metadata(self.loader, batches[-1][1])
            else:
                with run_observers().reading_ahead():
                    batch = next(self._source, _END)
                if batch is _END:
                    return batches, False
                if self.loader is None:
                    active = self._gradients.active_dataloader
                    self.loader = None if active is self._outer else active
                self._latest = data_loader.get_batch_metadata(self.loader)
                batches.append((batch, self._latest))
            if self.loader is not None and self.loader.end_of_dataloader:
                return batches, False
            part = self._accumulation.step_part()
            if len(batches) == self._gradients.num_steps if part is None else part.is_last:
                return batches, True

    def close(self) -> None:
        """Ends the iteration over the loader, at its end or before."""
        if self._goes_on:
            getattr(self._source, "close", lambda: None)()
        else:
            with run_observers().reading_ahead():
                next(self._source, None)


def _check_start(accumulation: Accumulation) -> None:
    if accumulation.weighting is not None:
        raise StateError(
            "windows() was started inside a window of accumulate(num_items=...) or of another windows(). "
            "Let that one end first."
        )
    state = accumulation.gradients
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
        "process without any cannot take part in an exchange of gradients. The further batches are left out; "
        "even_batches=True gives all processes equally many."
    )
