"""AcceleratedOptimizer: a torch optimizer that steps only when gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from accelerate import torch_private
from accelerate.base import DistributedType as DistributedType, is_lomo_available as is_lomo_available
from accelerate.devices import is_torch_xla_available as is_torch_xla_available
from accelerate.logging import get_logger
from accelerate.nested import honor_type as honor_type, recursively_apply
from accelerate.ops import reduce
from accelerate.precision import fp16_gradients_explained
from accelerate.state import AcceleratorState, GradientState, step_clock

logger = get_logger(__name__)

T = TypeVar("T")

_ATTACHED_BY_SCALER = (
    "_accelerate_step_called",
    "_optimizer_original_step_method",
    "_optimizer_patched_step_method",
)


def move_to_device(state: T, device: torch.device | str) -> T:
    """Return an optimizer state with its tensors on `device`.

    Args:
        state: a nested structure of lists, tuples, mappings and tensors.
        device: of the tensors.
    """
    moved: T = recursively_apply(lambda tensor: tensor.to(device), state)
    return moved


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `method` with a note on `accelerated_optimizer` that it was called.

    A gradient scaler calls the step of its optimizer only when all gradients are finite; the note,
    `_accelerate_step_called`, says whether it did.
    """

    def patched_step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return patched_step


def _no_step(*args: Any, **kwargs: Any) -> None:
    """Leave the parameters as they are."""


@torch.no_grad()
def are_finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Return whether all elements on this rank are finite, of gradients that may be sharded or missing."""
    local: list[Any] = [g.to_local() if hasattr(g, "to_local") else g for g in gradients if g is not None]
    local = [g.coalesce().values() if g.is_sparse else g for g in local]
    local = [g for g in local if g.numel()]
    return not local or bool(torch.nn.utils.get_total_norm(local, float("inf")).isfinite())


def steps_in_backward(optimizer: Any) -> bool:
    """Return whether an optimizer updates parameters while gradients appear, and has no step (LOMO)."""
    return callable(getattr(optimizer, "fused_backward", None))


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer: steps and clears gradients only on synchronising rounds, and through the
    gradient scaler.

    Args:
        optimizer: the optimizer to wrap; all of its attributes are reached through this object.
        device_placement: whether its state is moved to the device of the run.
        scaler: the gradient scaler of float16 training, `None` for the other formats.
    """

    _is_accelerate_prepared = True  # other projects ask for it

    num_updates: int = 0
    """How many times the parameters were updated, over all interruptions of a run."""

    num_skipped: int = 0
    """How many updates were skipped for gradients that were not finite, by `skip_nonfinite_updates`."""

    skips_nonfinite: bool = False
    """Whether an update is skipped on all ranks if a gradient of any rank is not finite."""

    is_joined: bool = False
    """Whether the optimizer steps inside `join_uneven_inputs`, where other ranks may have no batches left."""

    steps_in_backward: bool = False
    """Whether the inner optimizer does its work in `Accelerator.backward` (LOMO); `step` only counts."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        # The inner optimizer owns groups, state and hooks: torch's constructor would make second ones.
        self.optimizer = optimizer
        self.scaler = scaler
        self.accelerator_state = AcceleratorState()
        self.gradient_state = GradientState()
        self.device_placement = device_placement
        self.gradients_unscaled = False
        self.steps_in_backward = steps_in_backward(optimizer)
        self.skips_nonfinite = bool(self.gradient_state.plugin_kwargs.get("skip_nonfinite_updates"))
        self.note_scaled_step: Callable[[torch.amp.GradScaler], None] | None = None
        self._is_overflow = False
        if scaler is not None:
            self._attach_step_note()
        if device_placement and optimizer.state:  # torch's state_dict() of an empty one loads its compiler
            optimizer.load_state_dict(move_to_device(optimizer.state_dict(), self.accelerator_state.device))

    def _attach_step_note(self) -> None:
        self._accelerate_step_called = False
        self._optimizer_original_step_method = self.optimizer.step
        self._optimizer_patched_step_method = patch_optimizer_step(self, self.optimizer.step)

    @property
    def state(self) -> Any:
        """State of each parameter, as the inner optimizer holds it."""
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
        # Reached only for names that neither this object nor its class has, such as hooks and methods of
        # subclasses.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer; its tensors go to the device of their parameters."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, in its own format."""
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; does nothing while they accumulate.

        Args:
            set_to_none: `False` fills with zeros; the default drops the gradient tensors, as torch does.
        """
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none is None or set_to_none)

    def train(self) -> None:
        """Switch optimizers that know a training mode to it, such as schedule-free ones."""
        if callable(train := getattr(self.optimizer, "train", None)):
            train()

    def eval(self) -> None:
        """Switch optimizers that know an evaluation mode to it; nothing for the others."""
        if callable(evaluate := getattr(self.optimizer, "eval", None)):
            evaluate()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; does nothing while gradients accumulate.

        Args:
            closure: reevaluates the model and returns the loss, for optimizers that need it.

        Returns:
            What the inner optimizer returns; `None` when the step was left out.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if self.num_updates >= step_clock.measured_from:
            return self._measured_step(closure)
        if self.scaler is not None or self.steps_in_backward or self.skips_nonfinite:
            return self._step(closure)
        self.num_updates += 1
        return self.optimizer.step(closure)

    def _measured_step(self, closure: Callable[[], Any] | None) -> Any:
        """Step, and count the time, unless the clock begins with the next step."""
        before, updates = step_clock.begin_step(id(self)), self.num_updates
        result = self._step(closure)
        step_clock.end_step(before, id(self), self.num_updates - updates, self.num_updates)
        return result

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self.scaler is not None and not self.steps_in_backward:
            return self._scaled_step(closure)
        if self.skips_nonfinite and not self.steps_in_backward:
            self._is_overflow = self._must_skip()
            if self._is_overflow:
                return None
        self.num_updates += 1
        return None if self.steps_in_backward else self.optimizer.step(closure)

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        scaler: torch.amp.GradScaler = self.scaler  # type: ignore[assignment]
        step, original = self._optimizer_patched_step_method, self._optimizer_original_step_method
        must_skip = self.skips_nonfinite and self._must_skip()
        if must_skip:
            step = _no_step
        with (
            torch_private.step_replaced(self.optimizer, step, original),
            fp16_gradients_explained(self.optimizer),
        ):
            result = scaler.step(self.optimizer, *(() if closure is None else (closure,)))
        self._is_overflow = not self._accelerate_step_called
        self._accelerate_step_called = False
        self.num_updates += not self._is_overflow
        self.gradients_unscaled = False
        if must_skip:  # on this rank gradients may be finite, and its scaler would grow
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        elif self.note_scaled_step is None:
            scaler.update()
        else:
            self.note_scaled_step(scaler)
        return result

    def _must_skip(self) -> bool:
        """Returns whether a gradient of any rank is not finite, and logs that.

        All ranks must call it. Inside `join_uneven_inputs` only ranks with batches call it; the gradients
        that DistributedDataParallel has averaged are the same on all of them.
        """
        is_bad = not are_finite(p.grad for p in self.parameters())
        if not self.is_joined:
            device = self.accelerator_state.device
            is_bad = bool(float(reduce(torch.tensor(float(is_bad), device=device), "sum")))
        if not is_bad:
            return False
        self.num_skipped += 1
        logger.warning(
            f"Update {self.num_updates + 1} of {type(self.optimizer).__name__} is skipped on all ranks: a "
            f"gradient is infinite or NaN. Skipped so far: {self.num_skipped}."
        )
        return True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient was infinite or not a number."""
        return self._is_overflow

    def parameters(self) -> Iterable[torch.Tensor]:
        """Iterate over all parameters of all groups."""
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in (*_ATTACHED_BY_SCALER, "note_scaled_step"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.note_scaled_step = None
        if self.scaler is not None:
            self._attach_step_note()
