"""Accumulation of gradients over the micro-batches of an optimizer step, and observers of backward passes.

`Accelerator.accumulate` and `backward` delegate to the `Accumulation` of a run. A window is the micro-batches
from one optimizer step to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from accelerate import data_loader, ops, strategies, torch_private
from accelerate.accelerator.mistaken_windows import UndividedSteps, watch_unprepared_steps
from accelerate.accelerator.weighting import ItemWeighting, read_items
from accelerate.base import ConfigurationError, StateError, wrong_value
from accelerate.held_gradients import HeldGradients
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import Data, MeshAxis, axes_with
from accelerate.recovery import ReplicaGroups
from accelerate.state import DrivingLoader, GradientState, mesh_sizes, step_clock

if TYPE_CHECKING:
    from accelerate.accelerator.windows import Window

logger = get_logger(__name__)


@dataclass(eq=False)
class MicroBatches:
    """Position in the windows of a set of models that are trained together.

    Attributes:
        step: Number of micro-batches since the end of the last pass over a loader.
        position: Number of micro-batches in the current window, 0 after its last one.
        num_steps: Number of micro-batches of the current window, unless the loader ends before.
        items: Weighting of the losses of the current window if items are counted.
        driver: Finds the loader that ends the last window of its pass. None while no loader is read.
    """

    step: int = 0
    position: int = 0
    num_steps: int = 1
    items: ItemWeighting | None = None
    driver: DrivingLoader | None = None

    @property
    def loader(self) -> Any:
        """The loader that drives the loop, or None if no loader is read."""
        return None if self.driver is None else self.driver.loader

    def ends_pass(self, gradients: GradientState) -> bool:
        """Returns whether this micro-batch, for which loaders are read, ends a window with their pass."""
        self.driver = self.driver or DrivingLoader(prefers_unfinished=True)
        ends_pass = self.driver.begin_micro_batch(gradients.open_loaders())
        if not gradients.sync_with_dataloader:
            return False
        if self.driver.is_uncertain and self.num_steps > 1:
            logger.warning_once(
                "Several loaders yield a batch for each micro-batch, and the passes over some have one "
                "batch. accumulate() ends a window with the pass over one loader, and has chosen one that "
                "continues. If another one drives the loop, iterate over accelerator.windows(loader) "
                "instead."
            )
        return ends_pass

    def ends_after_pass(self, gradients: GradientState) -> bool:
        """Returns whether this micro-batch is that of the last batch of a pass that has ended."""
        driver, self.driver = self.driver, None
        is_late = driver is not None and driver.reads_ahead and gradients.sync_with_dataloader
        if is_late and self.num_steps > 1:
            logger.warning_once(
                "The loop reads the next batch before the micro-batch of a batch, so the second-to-last "
                "batch of a pass has ended a window, too. Iterate over accelerator.windows(loader) instead."
            )
        return is_late


class Accumulation:
    """Position within a window, and the scale of its losses.

    Windows are counted for each set of models that is passed to `accumulate`.

    Args:
        gradients: State that says whether the current micro-batch synchronizes gradients.
        groups: Replica groups of the run, whose loaders may begin the micro-batches.

    Attributes:
        current: Position of the models whose micro-batch has begun last, or None before the first one.
        weighting: Weighting of the losses in a window whose items are counted, and None otherwise, when the
            micro-batches of a window have equal weights.
        is_joined: Whether ranks may have different numbers of batches now.
        is_driven: Whether a loader begins the micro-batches, and not `accumulate`.
        loss_factor: Factor of losses while a loader begins the micro-batches, besides that of the window.
        num_parts: Number of ranks that divide the sequences whose items each of them has counted, or 1.
        trained: Optimizers of the current windows of several micro-batches, by models.
    """

    def __init__(
        self,
        strategy: strategies.Strategy,
        gradients: GradientState,
        prepared: strategies.Prepared,
        groups: ReplicaGroups,
    ) -> None:
        self.strategy, self.gradients, self.prepared = strategy, gradients, prepared
        self.groups = groups
        self.is_driven, self.loss_factor = False, 1.0
        self.num_parts = 1
        self.current: MicroBatches | None = None
        self.weighting: ItemWeighting | Window | None = None
        self.is_joined = False
        self._step = 0  # as set by the user or by a checkpoint
        self._sets: dict[tuple[nn.Module, ...], MicroBatches] = {}
        self.trained: dict[tuple[nn.Module, ...], list[AcceleratedOptimizer]] = {}
        self._undivided: UndividedSteps | None = None  # created with the first loss that is divided
        self._watch: weakref.finalize[..., Any] | None = None  # of the first window of several micro-batches
        self.groups.drive(self)

    @property
    def step(self) -> int:
        """Number of micro-batches since the end of the last pass over a loader."""
        return self._step if self.current is None else self.current.step

    @step.setter
    def step(self, step: int) -> None:
        self._sets.clear()
        self.current, self._step = None, step

    @property
    def has_held(self) -> bool:
        """True if an optimizer holds gradients of a window that has not ended with a step."""
        return any(o.held is not None for o in self.prepared.optimizers)

    def accumulate(self, models: tuple[nn.Module, ...], num_items: Any = None) -> AbstractContextManager[Any]:
        """Begins a micro-batch, and returns its context manager.

        Args:
            models: Models whose gradients are not synchronized before the last micro-batch, or none.
        """
        if self.is_driven:
            if num_items is not None:
                self.groups.check_use("num_items", num_items)
            return sync_context(self, self.gradients.sync_gradients, models)
        try:
            current = self._sets[models]
        except KeyError:
            # They may have been passed in another order before.
            same = (known for others, known in self._sets.items() if set(others) == set(models))
            current = next(same, None) or MicroBatches(self._step, self._step % self.gradients.num_steps)
            self._sets[models] = current
        self.current = current
        if num_items is not None or current.items is not None or self.weighting is not None:
            if num_items is not None:
                self.groups.check_use("num_items", num_items)
            self._check_items(current, num_items)
            if num_items is not None:
                return self._accumulate_items(current, models, num_items)
            self.weighting = None
        return _SYNCHRONIZED if self.advance(current, models) else sync_context(self, False, models)

    def advance(self, current: MicroBatches, models: Sequence[nn.Module]) -> bool:
        """Begins a micro-batch of models, and returns whether it synchronizes gradients."""
        gradients = self.gradients
        options, ends_pass = gradients.plugin_kwargs, False
        if is_first := current.position == 0:
            current.num_steps = options.get("num_steps", 1)
        if gradients.only_pass != 0:
            ends_pass = current.ends_pass(gradients)
        elif current.driver is not None:
            ends_pass = current.ends_after_pass(gradients)
        if "global_batch_size" in options and (part := self.step_part()) is not None:
            is_last, current.step = part.is_last, 0 if part.is_last else current.step + 1
        elif ends_pass:
            is_last, current.step = True, 0
        else:
            is_last = current.position + 1 >= current.num_steps
            current.step += 1
        gradients.sync_gradients = is_last
        if is_first and is_last and not self.trained:  # no gradients are held
            return True
        current.position = 0 if is_last else current.position + 1
        if not (is_first and is_last) or self.has_held:
            self.begin_window(models, is_first=is_first, is_last=is_last)
        return is_last

    def begin_window(
        self, models: Sequence[nn.Module] = (), *, is_first: bool = False, is_last: bool = False
    ) -> None:
        """Begins a micro-batch, and holds the gradients of a window of several until its end.

        Args:
            models: The models that are trained, or none for all of them.
        """
        key = tuple(models)
        if is_first or key not in self.trained:
            self.trained[key] = list(self._optimizers_of(models))
        trained = self.trained[key]
        for optimizer in self.prepared.optimizers:
            if optimizer.held is not None and optimizer not in trained:
                optimizer.held.leave()
        if is_first and is_last:
            self.release(models)
            return
        for optimizer in trained:
            optimizer.record_pass()  # `step` may be called in the last micro-batch only
            if optimizer.held is None:
                take_unreduced = partial(torch_private.TakenGradients, self.prepared.models)
                num_summed = self.strategy.replicas * self.groups.num_replicas
                set_again = partial(torch_private.restore_gradients, self.prepared.models)
                optimizer.held = HeldGradients(num_summed, take_unreduced, set_again)
                optimizer.holds_windows = True
            optimizer.held.begin(
                optimizer.parameters(), is_first=is_first, is_last=is_last, is_alone=len(trained) == 1
            )
        if self._watch is None and models:
            handle = watch_unprepared_steps(self.gradients, self.prepared, models)
            self._watch = weakref.finalize(self, handle.remove)
        elif is_first and self._watch is not None:
            self._watch()

    def end_backward(self) -> None:
        for optimizer in self.prepared.optimizers:
            if optimizer.held is not None:
                optimizer.held.end_backward()

    def release(self, models: Sequence[nn.Module]) -> None:
        """Ends a window of models without a step."""
        for optimizer in self._optimizers_of(models):
            optimizer.release_held()

    def _optimizers_of(self, models: Sequence[nn.Module]) -> Iterator[AcceleratedOptimizer]:
        """Yields the optimizers of models, or of all for none, whose gradients are accumulated in `grad`."""
        if not self.strategy.holds_gradients:
            return
        own = set(map(id, torch_private.parameters_and_shards(models or self.prepared.models)))
        for optimizer in self.prepared.optimizers:
            if not optimizer.steps_in_backward and not own.isdisjoint(map(id, optimizer.parameters())):
                yield optimizer

    def begin_backward(self) -> None:
        """Begins a backward pass, before the loss is scaled."""
        for optimizer in self.prepared.optimizers:
            if optimizer.held is not None:
                optimizer.held.begin_backward()

    def step_part(self) -> data_loader.StepPart | None:
        """Returns the part of this rank in a global batch of a constant size, or None without such a size.

        Raises:
            ConfigurationError: The loader does not divide global batches.
        """
        size = self.gradients.global_batch_size
        if size is None:
            return None
        driver = None if self.current is None else self.current.loader
        is_read = any(driver is loader for loader in self.gradients.dataloader_references[1:])
        loader = driver if is_read else self.gradients.active_dataloader
        part: data_loader.StepPart | None = getattr(loader, "step_part", None)
        return _refuse_loader(loader, size) if part is None else part

    @property
    def is_filler(self) -> bool:
        """True if this rank has no sample in the micro-batch, and gets one of another rank instead."""
        part = self.step_part()
        return part is not None and not part.weight

    def _accumulate_items(
        self, current: MicroBatches, models: Sequence[nn.Module], num_items: Any
    ) -> AbstractContextManager[Any]:
        is_on_device = isinstance(num_items, Tensor) and not num_items.is_cpu
        items = num_items if is_on_device else read_items(num_items)
        if current.items is None:
            copies, taken = partial(num_copies, self.strategy), partial(_held_gradients, self.prepared)
            current.items = ItemWeighting(self.strategy.replicas, copies, taken)
        self.num_parts = 1
        if current.position == 0:
            current.items.begin()
        self.advance(current, models)
        current.items.add(0.0 if self.is_filler else items, models or self.prepared.models)
        self.weighting = current.items
        context = sync_context(self, self.gradients.sync_gradients, models)
        if not self.gradients.sync_gradients:
            return context
        current.items.complete()
        for held in filter(None, (optimizer.held for optimizer in self.prepared.optimizers)):
            held.rescale = current.items.finish
        contexts = ExitStack()
        contexts.callback(setattr, self, "weighting", None)
        contexts.push(current.items.end)
        contexts.enter_context(context)
        return contexts

    def divided(self, block: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Returns a block in which ranks have parts of the sequences whose items may have been counted."""
        if self.weighting is not None and self.weighting.counts_items and not isinstance(block, nullcontext):
            sizes = mesh_sizes(self.strategy.loader_mesh)
            self.num_parts = prod(sizes.get(axis.value, 1) for axis in (MeshAxis.CP, MeshAxis.SP))
        return block

    def _of_whole(self, loss: Tensor) -> Tensor:
        """Returns a sum over the part of this rank in the mean over the items of whole sequences."""
        if mesh_sizes(self.strategy.loader_mesh).get(MeshAxis.SP.value, 1) > 1:  # models sum over whole ones
            raise ConfigurationError(
                "num_items counts whole sequences, and a loss in maybe_context_parallel covers the positions "
                "of this rank. With sp_size, leave out maybe_context_parallel, or call "
                "accumulate(num_items=...) inside of it with the items of this rank."
            )
        return loss * self.num_parts

    def _check_items(self, current: MicroBatches, num_items: object) -> None:
        """Raises an error for a micro-batch that does not fit into its window."""
        if self.weighting is not None and not isinstance(self.weighting, ItemWeighting):
            raise StateError(
                "accumulate() was called inside a window of windows(), which accumulates already. Leave it "
                "out."
            )
        if current.position and (num_items is None) != (current.items is None):
            raise StateError(
                "accumulate() was called with num_items in some micro-batches of a window and without in "
                "others, so losses cannot be weighted. Pass num_items in all of them or in none."
            )
        if num_items is None:
            current.items = None
            return
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

    def scale(self, loss: Tensor) -> Tensor:
        """Returns a loss times its weight in the window."""
        if self.weighting is not None:
            loss = self.weighting.scale(loss)
            if self.num_parts > 1:
                loss = self._of_whole(loss)
            return loss * 0 if self.is_filler else loss
        if self.is_driven:
            loss = loss * self.loss_factor
        options = self.gradients.plugin_kwargs
        if "global_batch_size" in options and (part := self.step_part()) is not None:
            if part.is_last != self.gradients.sync_gradients:
                raise StateError(
                    "backward() was called outside of accumulate(), and global_batch_size makes several "
                    "micro-batches of a step. Call backward() and optimizer.step() inside accumulate()."
                )
            return loss * part.weight
        current = self.current
        steps = options.get("num_steps", 1) if current is None else current.num_steps
        if steps == 1:
            return loss
        if current is None and not self.is_driven:
            self._undivided = self._undivided or UndividedSteps(self.prepared)
            self._undivided.count_loss(steps)
        return loss / steps

    def finish_items(self) -> None:
        """Rescales gradients of a window whose items are counted, before they are read."""
        if self.weighting is not None:
            self.weighting.finish()

    def reset(self) -> None:
        """Begins with the first micro-batch of a window."""
        self.weighting = None
        self.step = 0
        self.trained.clear()
        for optimizer in self.prepared.optimizers:
            optimizer.held = None

    def drop_gradients(self) -> None:
        """Removes the gradients of an unfinished window, except for those that an engine holds."""
        self.weighting = None
        if not self.strategy.holds_gradients:
            return
        self.drop_gradients_of(self.prepared.models)
        for optimizer in self.prepared.optimizers:
            optimizer.held = None
            optimizer.gradients_unscaled = False
            for parameter in optimizer.parameters():
                parameter.grad = None
        self.strategy.precision.forget_gradients()

    def drop_gradients_of(self, models: Iterable[nn.Module]) -> None:
        """Removes the gradients of models."""
        for model in models:
            for layer in self.strategy.layers:
                layer.drop_gradients(model)
            for parameter in model.parameters():
                parameter.grad = None


def _held_gradients(prepared: strategies.Prepared) -> list[tuple[Tensor, Tensor]]:
    """Returns the gradients that prepared optimizers hold, each after its parameter."""
    held = (optimizer.held for optimizer in prepared.optimizers if optimizer.held is not None)
    return [pair for each in held for pair in each.gradients]


def num_copies(strategy: strategies.Strategy) -> int:
    """Returns the number of ranks that read the same whole batch, and so count the same items."""
    sizes = mesh_sizes(strategy.loader_mesh)
    return prod(sizes.get(name, 1) for name in axes_with(Data.COPIES))


def _refuse_loader(loader: object, global_batch_size: int) -> NoReturn:
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
    context_of = partial(strategy.no_sync, early=is_early)
    if len(models) == 1:
        return context_of(models[0])
    contexts = ExitStack()
    for model in models:
        contexts.enter_context(context_of(model))
    return contexts


# Observers of a backward pass, which the step clock records


def local_scalar(value: object) -> torch.Tensor | None:
    """Returns a tensor of one element as this rank has it, detached, or None for other values.

    A distributed tensor that is not replicated has no value here, because its value needs a collective.
    """
    if not isinstance(value, torch.Tensor):
        return None
    tensor: Any = value.detach()
    if ops.is_dtensor(tensor):
        if not all(placement.is_replicate() for placement in tensor.placements):
            return None
        tensor = ops.local_tensor(tensor)
    is_number = tensor.numel() == 1 and not tensor.is_complex() and not tensor.is_meta
    return tensor if is_number else None


class StepValues:
    """Observer that keeps the loss and the norm of the gradients of steps that are recorded."""

    def loss_computed(self, loss: object) -> None:
        """Keeps a loss."""
        if step_clock.wanted:
            step_clock.keep("loss", local_scalar(loss))

    def norm_computed(self, norm: object) -> None:
        """Keeps a norm."""
        if step_clock.wanted:
            step_clock.keep("gradient_norm", local_scalar(norm))


class GradientExchanges:
    """Observer that finds out when a backward pass begins to wait for the gradients of other ranks.

    Callbacks at the end of a backward pass run in the order in which they are queued. One that is queued with
    the gradient of the loss runs before the callbacks of the wrappers, which wait.
    """

    def __init__(self, gradients: GradientState) -> None:
        self._gradients = gradients

    def before_backward(self, loss: torch.Tensor, arguments: object) -> None:
        """Adds a hook to a loss whose backward pass synchronizes gradients."""
        if self._gradients.sync_gradients and loss.requires_grad and get_ident() == step_clock.owner:
            loss.register_hook(_queue_callback)  # type: ignore[no-untyped-call]


def _queue_callback(gradient: torch.Tensor) -> None:
    torch_private.autograd_engine.queue_callback(step_clock.end_gradients)
