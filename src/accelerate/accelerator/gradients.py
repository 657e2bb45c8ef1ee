"""Facet of `Accelerator`: from loss to gradients that are ready for the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from accelerate import ops, strategies
from accelerate.accelerator.measured import local_scalar
from accelerate.accelerator.runtime import Runtime
from accelerate.accelerator.windows import Count, Window, Windows, exchange, read_items
from accelerate.base import ConfigurationError, StateError, wrong_value
from accelerate.monitoring import BACKWARD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import step_clock


class Gradients:
    """Accumulate, compute, clip and unscale gradients; raise a flag on one rank and see it on all."""

    _runtime: Runtime
    step: int
    flag_tensor: torch.Tensor | None

    @property
    def sync_gradients(self) -> bool:
        """Whether this round exchanges gradients and steps optimizers."""
        return self._runtime.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self._runtime.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of backward passes for each step of the optimizers."""
        return self._runtime.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self._runtime.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer left out its last step because gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._runtime.prepared.optimizers)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether any prepared optimizer updates parameters in the backward pass."""
        return any(optimizer.steps_in_backward for optimizer in self._runtime.prepared.optimizers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of `model` exchange no gradients.

        Args:
            model: a prepared model; on one process the context does nothing.
        """
        return self._runtime.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the backward pass exchanges gradients although the forwards ran under
        `no_sync`.

        Args:
            model: a prepared model whose forwards are done.
        """
        return strategies.sync_in_backward(model)

    def _do_sync(self) -> None:
        state = self._runtime.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state._set_sync_gradients(True)
        else:
            self.step += 1
            state._set_sync_gradients(self.step % state.num_steps == 0)

    def accumulate(self, *models: nn.Module, num_items: Any = None) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch: gradients add up, and every n-th round exchanges and applies
        them.

        The last batch of a loader always ends a round, so no gradient is left over.

        With `num_items` losses are sums, and gradients are those of the mean over all items of the window, on
        all ranks, however they are spread: equal to those of one big batch.

        Args:
            *models: prepared models that are trained in this step.
            num_items: how many items (tokens, pixels, samples) the losses of this micro-batch sum over on
                this rank, a number or a tensor of one; in all rounds of a window or in none.
        """
        runtime = self._runtime
        if num_items is not None or runtime.weights is not None:
            return self._accumulate_items(models, num_items)
        self._do_sync()
        state = runtime.gradient_state
        return exchange(state, state.sync_gradients, models, self.no_sync)

    def _accumulate_items(self, models: Sequence[nn.Module], num_items: Any) -> AbstractContextManager[Any]:
        runtime = self._runtime
        weights, state = runtime.counted_weights, runtime.gradient_state
        begins = state.sync_gradients  # the round before was the last of its window
        _check_round(runtime, begins, num_items)
        is_on_device = isinstance(num_items, torch.Tensor) and not num_items.is_cpu
        items = num_items if is_on_device else read_items(num_items)
        if begins:
            weights.begin()
        self._do_sync()
        weights.add(items, models or runtime.prepared.models)
        runtime.weights = weights
        context = exchange(state, state.sync_gradients, models, self.no_sync)
        if not state.sync_gradients:
            return context
        weights.complete()
        contexts = ExitStack()
        contexts.callback(setattr, runtime, "weights", None)
        contexts.enter_context(context)
        return contexts

    def windows(self, loader: Any, *models: nn.Module, num_items: Count | None = None) -> Windows:
        """Return the windows of a loader: the micro-batches of one optimizer step at a time.

        `for window in accelerator.windows(loader, num_items=count): for batch in window: ...` does what
        `accumulate` does, with the items of a window counted over all ranks before its first batch. Inside,
        `backward` takes losses that sum over items; gradients are those of the mean over all items of the
        window. Called on all ranks; ends on all of them when the first one has no batches left.

        Args:
            loader: a prepared loader.
            *models: prepared models that are trained; none for all of them.
            num_items: gives the number of items of a batch, on this rank. None counts every batch as one
                item, for losses that are means.

        Returns:
            An iterable of `Window`, each with `num_items` (of all ranks) and a length (of this rank).
        """
        return Windows(self._runtime, loader, models, num_items)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of `loss`, weighed by its part of the window, scaled as the number format needs.

        Args:
            loss: 0-d tensor, the mean over this process's batch; where items are counted (`num_items`), the
                sum over them.
            **kwargs: passed to `torch.Tensor.backward`. `learning_rate` serves optimizers that step during
                the backward pass, otherwise that of their groups; `scale_wrt_gas=False` says that the loss is
                weighed already.
        """
        if step_clock.wanted:
            step_clock.keep("loss", local_scalar(loss))
        learning_rate = kwargs.pop("learning_rate", None)
        if kwargs.pop("scale_wrt_gas", None) is not False:
            loss = self._weigh(loss)
        if not self.has_lomo_optimizer:
            self._runtime.backward(loss, **kwargs)
            return
        if kwargs:
            reason = "an optimizer that updates parameters in the backward pass runs it without arguments"
            raise wrong_value(", ".join(kwargs), list(kwargs.values()), reason, "Leave them out")
        if learning_rate is None:
            learning_rate = self._fused_optimizer().param_groups[0]["lr"]  # where schedulers write it
        self.lomo_backward(loss, learning_rate)

    def _weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the part of `loss` in its window: without counted items, every round weighs the same."""
        weights, steps = self._runtime.weights, self.gradient_accumulation_steps
        if weights is not None:
            return weights.weigh(loss)
        return loss if steps == 1 else loss / steps

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward pass of an optimizer that updates parameters while gradients appear (LOMO).

        Args:
            loss: 0-d tensor.
            learning_rate: rate of this update.

        Raises:
            ConfigurationError: no such optimizer is prepared, or several, which one pass cannot serve.
        """
        with step_clock.phase(BACKWARD):
            self._fused_optimizer().fused_backward(loss, learning_rate)

    def _fused_optimizer(self) -> AcceleratedOptimizer:
        optimizers = [item for item in self._runtime.prepared.optimizers if item.steps_in_backward]
        if not optimizers:
            raise ConfigurationError(
                "lomo_backward needs a prepared optimizer with a `fused_backward` method, and there is none. "
                "Prepare a Lomo or AdaLomo optimizer, or call `backward`."
            )
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"{len(optimizers)} prepared optimizers update parameters in the backward pass, and each "
                "needs a pass of its own. Give one of them the parameters of all."
            )
        return optimizers[0]

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring gradients to their true size before they are read or changed; nothing without a gradient
        scaler.

        Args:
            optimizer: a prepared optimizer or a list of them; `None` for all.
        """
        optimizers = self._runtime.prepared.optimizers if optimizer is None else optimizer
        self._runtime.strategy.precision.unscale(
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        )

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients so that their joint norm is at most `max_norm`; call it on all ranks, before
        `step`.

        Args:
            parameters: tensors with gradients, of prepared models.
            max_norm: largest norm; `float("inf")` only measures.
            norm_type: the p of the p-norm.

        Returns:
            The norm before clipping, a 0-d tensor; NaN where an engine (DeepSpeed, Megatron-LM) clips and has
            taken no step yet.
        """
        parameters, scale = self._unscaled(parameters)
        norm = self._runtime.strategy.clip_grad_norm(parameters, max_norm * scale, norm_type)
        norm = norm if scale == 1 else norm / scale
        if step_clock.wanted:
            step_clock.keep("gradient_norm", local_scalar(norm))
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut each gradient element to the range from `-clip_value` to `clip_value`, before `step`.

        Args:
            parameters: tensors with gradients, of prepared models.
            clip_value: largest absolute value.
        """
        parameters, scale = self._unscaled(parameters)
        self._runtime.strategy.clip_grad_value(parameters, clip_value * scale)

    def _unscaled(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Any, float]:
        """Unscale the gradients of parameters, if they are complete; return the scale that they still have.

        Gradients that still add up must stay scaled: the bound is scaled instead.
        """
        precision = self._runtime.strategy.precision
        if precision.scaler is None:
            return parameters, 1
        parameters = strategies.as_list(parameters)
        if not self.sync_gradients:
            return parameters, precision.gradient_scale()
        ids = {id(parameter) for parameter in parameters}
        optimizers = self._runtime.prepared.optimizers
        self.unscale_gradients([item for item in optimizers if strategies.parameter_ids([item]) & ids])
        return parameters, 1

    def set_trigger(self) -> None:
        """Raise a flag on this process; `check_trigger` on all processes then answers `True`."""
        self.flag_tensor = torch.tensor(1, device=self._runtime.state.device)

    def check_trigger(self) -> bool:
        """Whether any process has raised its flag since the last check; called on all ranks."""
        flag = self.flag_tensor
        if flag is None:
            flag = torch.tensor(0, device=self._runtime.state.device)
        raised = bool(ops.reduce(flag, reduction="sum").item())
        if raised:
            self.flag_tensor = None
        return raised

    set_breakpoint = set_trigger
    check_breakpoint = check_trigger


def _check_round(runtime: Runtime, begins: bool, num_items: Any) -> None:
    """Refuse a round that does not fit to the window around it."""
    if not runtime.strategy.holds_gradients:
        raise ConfigurationError(
            "accumulate(num_items=...) weighs gradients when the last batch is known, and this run keeps "
            "them where only its engine reaches them. Use windows(), which counts the items before the first "
            "batch."
        )
    if runtime.joins:
        raise ConfigurationError(
            "accumulate(num_items=...) sums items over all processes, and inside join_uneven_inputs some may "
            "have none left to take part. Use windows(), which ends on all processes together."
        )
    if isinstance(runtime.weights, Window):
        raise StateError(
            "accumulate() was called inside a window of windows(), which does its work already. Leave it out."
        )
    if num_items is None or (not begins and runtime.weights is None):
        raise StateError(
            "accumulate() was called with num_items in some rounds of a window and without in others, so "
            "losses cannot be weighed. Pass num_items in all of them or in none."
        )
