"""Windows: the micro-batches of one optimizer step, and what a loss weighs in their gradients.

`Runtime.weights` weighs losses where items are counted. `accumulate` counts them as the batches come: the
total is known in the last round. `Windows` reads the batches of a window, and sums their items over all
ranks, while the last batch of the window before is computed. What the loader says of a batch (is it the last
one, which samples are real) is kept with the batch and said again when it is used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from accelerate import data_loader, ops, torch_private
from accelerate.base import StateError, wrong_value
from accelerate.logging import get_logger
from accelerate.state import GradientState

if TYPE_CHECKING:
    from accelerate.accelerator.runtime import Runtime

logger = get_logger(__name__)

_END = object()

Count = Callable[[Any], Any]
"""The number of items of a batch."""

_Batches: TypeAlias = "deque[tuple[Any, data_loader.BatchMetadata]]"
"""The batches of a window on this rank, each with what the loader says of it."""


@dataclass(eq=False, repr=False)
class Windows:
    """The windows of one loader; each pass over this object is a pass over the loader."""

    _runtime: Runtime
    _loader: Any
    _models: Sequence[nn.Module]
    _count: Count | None

    def __len__(self) -> int:
        """The number of windows in a pass; needs a loader that has a length."""
        return math.ceil(len(self._loader) / self._runtime.gradient_state.num_steps)

    def __iter__(self) -> Iterator[Window]:
        runtime = self._runtime
        _check_start(runtime)
        reader = _Reader(runtime, self._loader, self._count)
        window: Window | None = None
        try:
            while (read := reader.take()) is not None:
                window = Window(runtime, self._models or runtime.prepared.models, reader, *read)
                yield window
                window.close()
        finally:
            if window is not None:  # left by an exception, this may be closed before the loop over the window
                window.close()
            reader.close()
            if runtime.weights is None:
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
            runtime.weights = None


class _Reader:
    """Reads a loader by windows and agrees with the other ranks on each of them."""

    def __init__(self, runtime: Runtime, loader: Any, count: Count | None) -> None:
        self._runtime = runtime
        self._count = count
        self._outer = runtime.gradient_state.active_dataloader
        self._source = iter(loader)
        self.loader: Any = None
        self._latest: data_loader.BatchMetadata = {}
        self._ahead: tuple[_Batches, ops.AsyncReduction] | None = None
        self._goes_on = True

    def read_ahead(self) -> None:
        """Read the next window, and start to sum its items; nothing where that is done or none can follow."""
        if self._ahead is not None or not self._goes_on:
            return
        batches, more = self._read()
        length = len(batches)
        items = length if self._count is None else sum_items([self._count(batch) for batch, _ in batches])
        answer = ops.reduce_async(
            [items, float(bool(length)), float(more), length, length * length],
            "sum",
            "accelerate.Accelerator.windows",
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
        sync_each_batch = self._runtime.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if sync_each_batch and length * length != size * squares:
            raise StateError(
                f"The processes have different numbers of batches in this window ({length:g} in all), and "
                "with sync_each_batch=True they exchange gradients after each of them. Use "
                "sync_each_batch=False, or a loader that gives all processes equally many (even_batches)."
            )
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

    def close(self) -> None:
        """End the pass over the loader, at its end or before."""
        if self._goes_on:
            getattr(self._source, "close", lambda: None)()
        else:
            next(self._source, None)


def _check_start(runtime: Runtime) -> None:
    if runtime.weights is not None:
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


class CountedWeights:
    """Items are counted as rounds come, and the total is known in the last round only.

    Until then losses weigh about as in the window before. When the total is known, and before the last
    backward pass exchanges anything, the accumulated gradients are rescaled, so that the exchange, the
    scaler, clipping and the optimizer read the right ones.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._factor = 1.0  # equal on all ranks at any time: ranks may exchange in each round
        self.begin()

    def begin(self) -> None:
        """Start a window."""
        # By a power of two no gradient is rounded, so the result does not depend on the window before.
        self._factor = 2.0 ** (math.frexp(self._factor)[1] - 1)
        self._items: list[Any] = []
        self._models: dict[int, nn.Module] = {}
        self._answer: ops.AsyncReduction | None = None

    def add(self, items: Any, models: Sequence[nn.Module]) -> None:
        """Count a round: its items on this rank (tensors on devices are read later), and the models in it."""
        self._items.append(items)
        self._models.update((id(model), model) for model in models)

    def complete(self) -> None:
        """Begin to sum the items of all ranks: this is the last round. Called on all ranks."""
        self._answer = ops.reduce_async([sum_items(self._items)], "sum", "accelerate.Accelerator.accumulate")

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the factor of the window, which the first call of the last round receives."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            factor = factor_of(answer.wait()[0], self._replicas)
            if len(self._items) > 1:
                rescale_gradients(self._models.values(), factor / self._factor)
            self._factor = factor
        return loss * self._factor


_EXCHANGING: AbstractContextManager[None] = nullcontext()
"""The context of a round that exchanges gradients: it holds nothing, so one object serves all rounds."""


def exchange(
    state: GradientState,
    is_last: bool,
    models: Sequence[nn.Module],
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
) -> AbstractContextManager[Any]:
    """Return the context of one round, in which models exchange gradients if it is the last of its window."""
    if is_last or state.plugin_kwargs.get("sync_each_batch", False):
        return _EXCHANGING
    if len(models) == 1:
        return no_sync(models[0])
    contexts = ExitStack()
    for model in models:
        contexts.enter_context(no_sync(model))
    return contexts


def forget_gradients(runtime: Runtime) -> None:
    """Forget the gradients of the window that a loaded checkpoint has ended; engines keep theirs."""
    runtime.weights = None
    if not runtime.strategy.holds_gradients:
        return
    drop_gradients(runtime.prepared.models)
    for optimizer in runtime.prepared.optimizers:
        optimizer.gradients_unscaled = False
        for parameter in optimizer.parameters():
            parameter.grad = None
    if runtime.strategy.precision.scaler is not None:
        torch_private.reset_unscaled(runtime.strategy.precision.scaler)


def factor_of(total: float, replicas: int) -> float:
    """Return the factor from a sum over items of one rank to its part of the mean over all in the window.

    The backward pass averages the gradients of so many replicas.
    """
    if not total:
        raise StateError(
            "The window has no items: num_items is 0 in each of its batches on all processes, so there is no "
            "mean to form. Leave batches without items out of the dataset, or count at least one in each "
            "window."
        )
    return replicas / total


def read_items(value: Any) -> float:
    """Return a number of items as a float."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    fix = "Pass how many items the loss sums over"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_value("num_items", value, f"it is a {type(value).__name__}, not a number", fix)
    items = float(value)
    if not 0 <= items < math.inf:
        raise wrong_value("num_items", value, "a count is finite and not negative", fix)
    return items


def sum_items(values: Sequence[Any]) -> float:
    """Return the sum of numbers of items; tensors on a device are waited for once, not one by one."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() == 1]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        values = torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()
    return sum(map(read_items, values))


def rescale_gradients(models: Collection[nn.Module], factor: float) -> None:
    """Multiply the gradients of models by a factor, those of shared parameters once."""
    if factor == 1.0:
        return
    parameters = {id(p): p for model in models for p in model.parameters()}
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    gradients += [gradient for model in models for gradient in torch_private.unreduced_gradients(model)]
    gradients = list({id(gradient): gradient for gradient in gradients}.values())  # some units are gathered
    with torch.no_grad():
        # torch multiplies no list of distributed and plain tensors
        dense = [ops.local_tensor(gradient) for gradient in gradients if not gradient.is_sparse]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)


def drop_gradients(models: Iterable[nn.Module]) -> None:
    """Forget the gradients of models."""
    for model in models:
        torch_private.drop_unreduced_gradients(model)
        for parameter in model.parameters():
            parameter.grad = None
