"""Accumulation of gradients over the micro-batches of an optimizer step.

`Accelerator.accumulate` and `backward` delegate to the `Accumulation` of a run. A window is the micro-batches
from one optimizer step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from accelerate import data_loader, strategies, torch_private
from accelerate.accelerator.weighting import ItemWeighting, LossWeighting, drop_gradients, read_items
from accelerate.base import ConfigurationError, StateError, wrong_value
from accelerate.state import GradientState, mesh_sizes

if TYPE_CHECKING:
    from accelerate.recovery import Recovery


class Accumulation:
    """Position within a window, and the scale of its losses.

    Args:
        strategy: Strategy whose `no_sync` keeps gradients local.
        gradients: State that says whether the current micro-batch synchronizes gradients.
        prepared: Prepared models and optimizers.
        recovery: Replica groups of the run, whose loaders say which micro-batch synchronizes gradients.

    Attributes:
        step: Number of micro-batches since the end of the last pass over a loader.
        weighting: Weighting of the losses in a window whose items are counted, and None otherwise, when the
            micro-batches of a window have equal weights.
        is_joined: Whether ranks may have different numbers of batches now.
    """

    def __init__(
        self,
        strategy: strategies.Strategy,
        gradients: GradientState,
        prepared: strategies.Prepared,
        recovery: Recovery | None = None,
    ) -> None:
        self.strategy, self.gradients, self.prepared = strategy, gradients, prepared
        self.recovery = recovery
        self.step = 0
        self.weighting: LossWeighting | None = None
        self.is_joined = False
        self._items = ItemWeighting(strategy.replicas, partial(num_copies, strategy))

    def accumulate(self, models: Sequence[nn.Module], num_items: Any = None) -> AbstractContextManager[Any]:
        """Begins a micro-batch, and returns its context manager.

        Args:
            models: Models whose gradients are not synchronized before the last micro-batch, or none.
            num_items: Number of items on this rank, or None for equal weights.
        """
        if num_items is not None and self.recovery is not None:
            reason = "the items of a step are not known when replica groups repeat it"
            raise wrong_value("num_items", num_items, reason, "Return the mean loss, or leave --replicas out")
        if num_items is not None or self.weighting is not None:
            return self._accumulate_items(models, num_items)
        self.advance()
        return sync_context(self, self.gradients.sync_gradients, models)

    def advance(self) -> None:
        """Begins a micro-batch, and sets whether it synchronizes gradients."""
        gradients = self.gradients
        if self.recovery is not None and self.recovery.in_pass:
            return
        part = self.step_part()
        if part is not None:
            self.step = 0 if part.is_last else self.step + 1
            gradients._set_sync_gradients(part.is_last)
        elif gradients.sync_with_dataloader and gradients.end_of_dataloader:
            self.step = 0
            gradients._set_sync_gradients(True)
        else:
            self.step += 1
            gradients._set_sync_gradients(self.step % gradients.num_steps == 0)

    def step_part(self) -> data_loader.StepPart | None:
        """Returns the part of this rank in a global batch of a constant size, or None without such a size.

        Raises:
            ConfigurationError: The loader does not divide global batches.
        """
        size = self.gradients.global_batch_size
        if size is None:
            return None
        loader = self.gradients.active_dataloader
        part: data_loader.StepPart | None = getattr(loader, "step_part", None)
        return _refuse_loader(loader, size) if part is None else part

    @property
    def is_filler(self) -> bool:
        """True if this rank has no sample in the micro-batch, and gets one of another rank instead."""
        part = self.step_part()
        return part is not None and not part.weight

    def num_copies(self) -> int:
        """Returns the number of ranks that read the same whole batch, and so count the same items."""
        return num_copies(self.strategy)

    def _accumulate_items(self, models: Sequence[nn.Module], num_items: Any) -> AbstractContextManager[Any]:
        begins_window = self.gradients.sync_gradients  # the micro-batch before was the last of its window
        self._check_items(begins_window, num_items)
        is_on_device = isinstance(num_items, Tensor) and not num_items.is_cpu
        items = num_items if is_on_device else read_items(num_items)
        if self.is_filler:
            items = 0.0
        if begins_window:
            self._items.begin()
        self.advance()
        self._items.add(items, models or self.prepared.models)
        self.weighting = self._items
        context = sync_context(self, self.gradients.sync_gradients, models)
        if not self.gradients.sync_gradients:
            return context
        self._items.complete()
        contexts = ExitStack()
        contexts.callback(self._end_window)
        contexts.enter_context(context)
        return contexts

    def _end_window(self) -> None:
        self.weighting = None

    def _check_items(self, begins_window: bool, num_items: Any) -> None:
        """Raises an error for a micro-batch that does not fit into its window."""
        if not self.strategy.holds_gradients:
            raise ConfigurationError(
                "accumulate(num_items=...) rescales gradients when the last batch is known, and in this "
                "run only an engine has access to them. Use windows(), which counts the items before the "
                "first batch."
            )
        if self.is_joined:
            raise ConfigurationError(
                "accumulate(num_items=...) sums items over all processes, and inside join_uneven_inputs some "
                "may have no batch left. Use windows(), which ends on all processes together."
            )
        if self.weighting is not None and self.weighting is not self._items:
            raise StateError(
                "accumulate() was called inside a window of windows(), which accumulates already. Leave it "
                "out."
            )
        if num_items is None or (not begins_window and self.weighting is None):
            raise StateError(
                "accumulate() was called with num_items in some micro-batches of a window and without in "
                "others, so losses cannot be weighted. Pass num_items in all of them or in none."
            )

    def scale(self, loss: Tensor) -> Tensor:
        """Returns a loss times its weight in the window."""
        if self.weighting is not None:
            loss = self.weighting.scale(loss)
            return loss * 0 if self.is_filler else loss
        if self.recovery is not None:
            loss = loss * self.recovery.loss_scale
        if (part := self.step_part()) is not None:
            if part.is_last != self.gradients.sync_gradients:
                raise StateError(
                    "backward() was called outside of accumulate(), and global_batch_size makes several "
                    "micro-batches of a step. Call backward() and optimizer.step() inside accumulate()."
                )
            return loss * part.weight
        steps = self.gradients.num_steps
        return loss if steps == 1 else loss / steps

    def reset(self) -> None:
        """Begins with the first micro-batch of a window."""
        self.weighting = None
        self.step = 0

    def drop_gradients(self) -> None:
        """Removes the gradients of an unfinished window, except for those that an engine holds."""
        self.weighting = None
        if not self.strategy.holds_gradients:
            return
        drop_gradients(self.prepared.models)
        for optimizer in self.prepared.optimizers:
            optimizer.gradients_unscaled = False
            for parameter in optimizer.parameters():
                parameter.grad = None
        if self.strategy.precision.scaler is not None:
            torch_private.reset_unscaled(self.strategy.precision.scaler)


def num_copies(strategy: strategies.Strategy) -> int:
    """Returns the number of ranks that read the same whole batch, and so count the same items."""
    sizes = mesh_sizes(strategy.loader_mesh)
    return sizes.get("tp", 1) * sizes.get("pp", 1)


def _refuse_loader(loader: Any, global_batch_size: int) -> NoReturn:
    """Raises an error for a loader that does not divide global batches."""
    reason = "a constant global batch divides the batches of torch's BatchSampler, whose size divides it"
    fix = "Use a loader with batch_size, or gradient_accumulation_steps"
    if loader is None:
        reason, fix = "no prepared loader is being read", "Read the batches from a loader of `prepare`"
    raise wrong_value("global_batch_size", global_batch_size, reason, fix)


_SYNCHRONIZED: AbstractContextManager[None] = nullcontext()
"""Context manager for all micro-batches that synchronize gradients. It has no state."""


def sync_context(
    accumulation: Accumulation, is_last: bool, models: Sequence[nn.Module]
) -> AbstractContextManager[Any]:
    """Returns the context manager of a micro-batch, in which only the last one synchronizes gradients."""
    if is_last:
        return _SYNCHRONIZED
    strategy = accumulation.strategy
    is_early = accumulation.gradients.plugin_kwargs.get("sync_each_batch", False)
    context_of = strategy.early_sync if is_early else strategy.no_sync
    if len(models) == 1:
        return context_of(models[0])
    contexts = ExitStack()
    for model in models:
        contexts.enter_context(context_of(model))
    return contexts
