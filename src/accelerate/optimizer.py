"""Wrapper of a torch optimizer that steps only when gradients are synchronized, returned by `prepare`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import torch

from accelerate import torch_private
from accelerate.base import (
    DistributedType as DistributedType,
    is_lomo_available as is_lomo_available,
    wrong_value,
)
from accelerate.devices import is_torch_xla_available as is_torch_xla_available
from accelerate.held_gradients import HeldGradients
from accelerate.logging import get_logger
from accelerate.nested import honor_type as honor_type, recursively_apply
from accelerate.ops import reduce
from accelerate.precision import explain_fp16_gradients
from accelerate.state import (
    AcceleratorState,
    DrivingLoader,
    GradientState,
    Observers,
    run_observers,
    step_clock,
)

logger = get_logger(__name__)

T = TypeVar("T")

_SCALER_ATTRIBUTES = (
    "_accelerate_step_called",
    "_optimizer_original_step_method",
    "_optimizer_patched_step_method",
)


def move_to_device(state: T, device: torch.device | str) -> T:
    """Returns an optimizer state with its tensors on `device`.

    Args:
        state: Nested structure of lists, tuples, mappings and tensors.
        device: Device of the returned tensors.
    """
    moved: T = recursively_apply(lambda tensor: tensor.to(device), state)
    return moved


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `method` with a wrapper that sets `_accelerate_step_called` of `accelerated_optimizer`.

    A gradient scaler calls the step of its optimizer only if all gradients are finite, unless the optimizer
    checks that itself, as fused optimizers do. The attribute shows whether parameters were updated.
    """
    reference = weakref.ref(accelerated_optimizer)  # the optimizer has the function

    @wraps(method)  # a scaler reads the signature
    def patched_step(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        owner = reference()
        if owner is not None:
            owner._accelerate_step_called = not torch_private.found_inf(owner.optimizer, owner.scaler)
        return result

    return patched_step


def _no_step(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in place of the step of an optimizer that is skipped."""


def _call_in_step(closure: Callable[[], Any], mean_loss: Callable[[Any], Any] | None) -> Any:
    """Returns the loss of a closure, after whose backward pass the step of the optimizer continues.

    It is the mean over ranks, so that line searches of all ranks evaluate the closure as often.
    """
    result = closure()
    if mean_loss is not None:
        result = mean_loss(result)
    step_clock.before_step()
    return result


@torch.no_grad()
def are_finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether all gradients on this rank are finite, where gradients may be sharded or None."""
    local: list[Any] = [g.to_local() if hasattr(g, "to_local") else g for g in gradients if g is not None]
    local = [g.coalesce().values() if g.is_sparse else g for g in local]
    local = [g for g in local if g.numel()]
    return not local or bool(torch.nn.utils.get_total_norm(local, float("inf")).isfinite())


@cache
def _optimizers_with_one_call() -> frozenset[type]:
    """Returns the optimizers of torch that call a closure once in each step, before the update."""
    optimizers = (value for value in vars(torch.optim).values() if isinstance(value, type))
    return frozenset(optimizers) - {torch.optim.LBFGS}


def _identity(value: T) -> T:
    return value


def _set_mode(optimizer: Any, name: str) -> None:
    """Calls `train` or `eval` of the outermost optimizer that has it, below any number of wrappers."""
    visited: list[Any] = []
    while optimizer is not None and not any(optimizer is wrapper for wrapper in visited):
        if callable(method := getattr(optimizer, name, None)):
            method()
            return
        visited.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)


def steps_in_backward(optimizer: object) -> bool:
    """Returns whether an optimizer updates parameters during backward and has no step (LOMO)."""
    return callable(getattr(optimizer, "fused_backward", None))


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wrapper of a torch optimizer for gradient accumulation and gradient scaling.

    It updates parameters and clears gradients only in steps that synchronize gradients. All attributes of the
    inner optimizer are available.

    Args:
        optimizer: Optimizer to wrap.
        device_placement: Whether the state of the optimizer is moved to the device of the run.
        scaler: Gradient scaler of float16 training. None for other dtypes.
    """

    _is_accelerate_prepared = True  # other projects read it

    num_updates: int = 0
    """Number of updates of the parameters, including those before a resume of the run."""

    last_pass: int = 0
    """Number of the pass that drove the loop in the last `step`, or micro-batch of a window of several."""

    num_skipped: int = 0
    """Number of updates that `skip_nonfinite_updates` has skipped because gradients were not finite."""

    skips_nonfinite: bool = False
    """True if all ranks skip an update when a gradient of any rank is not finite."""

    is_joined: bool = False
    """True inside `join_uneven_inputs`, where other ranks may have no batches left."""

    conditions: tuple[Callable[[], bool], ...] = ()
    """Functions that return whether a step is taken, for all ranks together."""

    held: HeldGradients | None = None
    """Gradients of the current window, if it has several micro-batches."""

    holds_windows: bool = False
    """True if `held` is set in each window of several micro-batches, and None means that none is open."""

    mean_loss: Callable[[Any], Any] | None = None
    """Returns the mean over all ranks of the loss of a closure, in a run with several ranks."""

    step_wrappers: tuple[Callable[..., Any], ...] = ()
    """Functions that are called in place of the step of the inner optimizer, which they get."""

    _driver: DrivingLoader | None = None

    steps_in_backward: bool = False
    """True if the inner optimizer updates parameters in `Accelerator.backward` (LOMO), not in `step`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        # The inner optimizer has the groups, state and hooks. torch's constructor would create second ones.
        self.optimizer = optimizer
        self.scaler = scaler
        self.accelerator_state = AcceleratorState()
        self.gradient_state = GradientState()
        self.device_placement = device_placement
        self._observers, self._run = Observers(), run_observers()
        self.gradients_unscaled = False
        self.steps_in_backward = steps_in_backward(optimizer)
        self.skips_nonfinite = bool(self.gradient_state.plugin_kwargs.get("skip_nonfinite_updates"))
        self.update_scaler: Callable[..., None] | None = None
        self._is_overflow = False
        if scaler is not None:
            self._attach_patched_step()
        if (
            device_placement and optimizer.state
        ):  # state_dict() of an empty state would import torch's compiler
            state = move_to_device(optimizer.state_dict(), self.accelerator_state.device)
            optimizer.load_state_dict(state)
            torch_private.keep_dtypes(optimizer, state)

    def _attach_patched_step(self) -> None:
        self._accelerate_step_called = False
        self._optimizer_original_step_method = self.optimizer.step
        self._optimizer_patched_step_method = patch_optimizer_step(self, self.optimizer.step)

    @property
    def observers(self) -> tuple[Any, ...]:
        """Observers of this optimizer, whose `before_step` and `after_update` are called with it."""
        return self._observers.all

    @observers.setter
    def observers(self, observers: Iterable[Any]) -> None:
        self._observers = Observers(observers)

    @property
    def state(self) -> Any:
        """State of each parameter in the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """Parameter groups of the inner optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        """Default options of the inner optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        # Called only for names that neither this object nor its class has, such as hooks and methods of
        # subclasses.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        self._observers.group_added(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the inner optimizer, with its tensors on the device of their parameters.

        States that an optimizer keeps in a wider dtype than its parameters keep the dtype, unlike in torch.

        Raises:
            StateError: The optimizer steps whole matrices, and the state dict has only those of another rank.
        """
        self._observers.before_load(state_dict)
        self.optimizer.load_state_dict(state_dict)
        torch_private.keep_dtypes(self.optimizer, state_dict)
        torch_private.mark_stepped(self.optimizer)  # in the run that saved the state
        self._observers.after_load()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the inner optimizer, in its own format.

        With whole matrices it has the states of the matrices that this rank owns.
        """
        self._observers.before_state_dict()
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients, except for those that micro-batches have accumulated for the next step.

        Args:
            set_to_none: Whether gradients are set to None or filled with zeros. None is the default of the
                inner optimizer, which sets them to None unless it overrides `zero_grad`.
        """
        clear = self.optimizer.zero_grad
        if set_to_none is not None:  # optimizers of other projects may not take it
            clear = partial(clear, set_to_none)
        if self.held is not None:
            self.held.zero_grad(clear)
        elif self.holds_windows or self.gradient_state.sync_gradients:
            clear()

    def train(self) -> None:
        """Sets the training mode of optimizers that have one, such as schedule-free optimizers."""
        _set_mode(self.optimizer, "train")

    def eval(self) -> None:
        """Sets the evaluation mode of optimizers that have one, such as schedule-free optimizers."""
        _set_mode(self.optimizer, "eval")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters, except in accumulation steps without synchronization.

        Args:
            closure: Function that reevaluates the model and returns the loss, for optimizers that need it.

        Returns:
            The result of the step of the inner optimizer, or None if it was skipped. In a micro-batch without
            synchronization it is that of the closure.

        Raises:
            ConfigurationError: A closure is passed in a micro-batch without synchronization, or with a scaler
                of fp16, and the optimizer may call it several times in a step.
        """
        gradients, held = self.gradient_state, self.held
        if held is None:
            number = gradients.only_pass
            self.last_pass = self._find_pass() if number is None else number
        if not gradients.sync_gradients:
            return self._accumulate(closure)
        if closure is not None:
            closure = self._wrap_closure(closure)
        elif held is not None:
            self._complete()
        num_updates = self.num_updates
        self._run.before_step(self)
        try:
            return self._observed_step(closure) if self._observers.all else self._step(closure)
        finally:
            self._run.after_step(self, self.num_updates - num_updates)

    def _observed_step(self, closure: Callable[[], Any] | None) -> Any:
        """Steps between the calls of the observers of this optimizer."""
        observers, num_updates = self._observers, self.num_updates
        observers.before_step(self)
        result = self._step(closure)
        if self.num_updates != num_updates:
            observers.after_update(self)
        return result

    def _wrap_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that ends the window, and returns the mean loss over all ranks."""
        if self.held is not None:
            closure = partial(self._complete, closure)
        return partial(_call_in_step, closure, None if self.is_joined else self.mean_loss)

    def record_pass(self) -> None:
        """Sets `last_pass` in a micro-batch."""
        number = self.gradient_state.only_pass
        self.last_pass = self._find_pass() if number is None else number

    def _find_pass(self) -> int:
        """Returns the number of the pass that drives the loop, while several loaders are being read."""
        self._driver = self._driver or DrivingLoader()
        return self.gradient_state.find_pass(self._driver)

    def release_held(self) -> None:
        """Ends a window without a step."""
        if self.held is not None:
            self.held.drop_cleared()
            self.held = None

    def _accumulate(self, closure: Callable[[], Any] | None) -> Any:
        """Keeps the gradients of a micro-batch without synchronization for the next ones."""
        result = None
        if closure is not None:
            # Closures share the variables of the loop, so that of an earlier batch cannot be called later.
            reason = "the optimizer may call it several times, and each call has the data of one micro-batch"
            fix = "Use gradient_accumulation_steps=1, and sum the losses of several batches in the closure"
            result = self._call_once(closure, reason, fix)
        if self.held is not None:
            self.held.contribute()
        return result

    def _call_once(self, closure: Callable[[], Any], reason: str, fix: str) -> Any:
        """Returns the result of a closure, and raises for optimizers that may call it several times."""
        if type(self.optimizer) not in _optimizers_with_one_call():
            raise wrong_value("closure", type(self.optimizer).__name__, reason, fix)
        with torch.enable_grad():
            return closure()

    def _call_before_update(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Calls a closure, and returns a function that returns its result."""
        reason = "the optimizer may call it several times, and a step is taken or skipped after one call"
        fix = "Leave out fp16, --replicas and skip_nonfinite_updates, or use another optimizer"
        return partial(_identity, self._call_once(closure, reason, fix))

    def _complete(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the window after its last backward pass, which may be that of a closure."""
        result = None if closure is None else closure()
        if self.held is not None:
            self.held.complete()
            self.held = None
        return result

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._is_overflow = False
        if self.conditions or self.skips_nonfinite:
            closure = closure and self._call_before_update(closure)
            if not self._meets_conditions():
                return None
        if self.steps_in_backward:
            self.num_updates += 1
            return None
        if self.scaler is not None:
            return self._scaled_step(closure)
        step = self.optimizer.step
        for wrapper in self.step_wrappers:
            step = partial(wrapper, step)
        result = step() if closure is None else step(closure)  # some optimizers take no closure
        self.num_updates += 1
        return result

    def _meets_conditions(self) -> bool:
        """Returns whether a step is taken, and records that otherwise.

        A scaler skips gradients that are not finite by itself.
        """
        for is_taken in self.conditions:
            if not is_taken():
                self._is_overflow, self.gradients_unscaled = True, False
                if self.scaler is not None:
                    torch_private.reset_unscaled(self.scaler, self.optimizer)
                return False
        is_plain = self.scaler is None and not self.steps_in_backward
        self._is_overflow = is_plain and self.skips_nonfinite and self._must_skip()
        return not self._is_overflow

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        scaler: torch.amp.GradScaler = self.scaler  # type: ignore[assignment]
        if closure is not None and scaler.is_enabled():  # it computes gradients that are unscaled first
            closure = self._call_before_update(closure)
        step: Callable[..., Any] = self._optimizer_patched_step_method
        for wrapper in self.step_wrappers:
            step = partial(wrapper, step)
        original = self._optimizer_original_step_method
        must_skip = self.skips_nonfinite and self._must_skip()
        if must_skip:
            step = _no_step
        with (
            torch_private.step_replaced(self.optimizer, step, original),
            explain_fp16_gradients(self.optimizer),
        ):
            result = scaler.step(self.optimizer, *(() if closure is None else (closure,)))
        self._is_overflow = not self._accelerate_step_called
        self._accelerate_step_called = False
        self.num_updates += not self._is_overflow
        self.gradients_unscaled = False
        update = scaler.update if self.update_scaler is None else partial(self.update_scaler, scaler)
        if must_skip:  # gradients of this rank may be finite, and its scale would grow
            update(scaler.get_scale() * scaler.get_backoff_factor())
        else:
            update()
        return result

    def _must_skip(self) -> bool:
        """Returns whether a gradient of any rank is not finite, and logs that.

        All ranks must call it. Inside `join_uneven_inputs` only ranks with batches call it, all of which have
        the same gradients, averaged by DistributedDataParallel.
        """
        has_nonfinite = not are_finite(p.grad for p in self.parameters())
        if not self.is_joined:
            device = self.accelerator_state.device
            has_nonfinite = bool(float(reduce(torch.tensor(float(has_nonfinite), device=device), "sum")))
        if not has_nonfinite:
            return False
        self.num_skipped += 1
        logger.warning(
            f"Update {self.num_updates + 1} of {type(self.optimizer).__name__} is skipped on all ranks: a "
            f"gradient is infinite or NaN. Skipped so far: {self.num_skipped}."
        )
        return True

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because a gradient was infinite or NaN."""
        return self._is_overflow

    def parameters(self) -> Iterable[torch.Tensor]:
        """Returns an iterator over the parameters of all groups."""
        return chain.from_iterable(map(itemgetter("params"), self.optimizer.param_groups))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        names = ("update_scaler", "_observers", "_run", "step_wrappers", "held", "mean_loss")
        for name in (*_SCALER_ATTRIBUTES, *names):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._observers, self._run = Observers(), run_observers()
        self.update_scaler = None
        if self.scaler is not None:
            self._attach_patched_step()
