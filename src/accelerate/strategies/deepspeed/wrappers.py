"""DeepSpeed's engine, optimizer and scheduler as training loops call them, and stand-ins for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from accelerate.base import wrong_value
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.strategies.bundle import Kind

logger = get_logger(__name__)

_DEEPSPEED = ("DeepSpeed", "deepspeed_plugin=DeepSpeedPlugin(...)")


def no_step() -> None:
    """The step of an optimizer whose engine steps by itself."""


class DeepSpeedEngineWrapper:
    """One engine: backward passes, and the step that its last backward pass of a window owes.

    The step is taken by `backward` here, and by the training loop's `clip_grad_norm_` or `optimizer.step()`
    where the `Accelerator` calls `compute_gradients`.

    Args:
        engine: as `deepspeed.initialize` returns it.

    Attributes:
        owes_step: whether gradients are complete and no step has been taken yet.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.owes_step = False

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and step when they are complete.

        Args:
            loss: 0-d tensor; the engine divides it by its accumulation steps.
            sync_gradients: whether this is the last backward pass of a window.
            **kwargs: passed to the engine's `backward`.
        """
        self.compute_gradients(loss, sync_gradients, **kwargs)
        self.finish_step()

    def compute_gradients(self, loss: torch.Tensor, sync_gradients: bool, **kwargs: Any) -> None:
        """Compute gradients; the step comes later.

        Args:
            loss: 0-d tensor.
            sync_gradients: whether this is the last backward pass of a window.
            **kwargs: passed to the engine's `backward`.
        """
        self.finish_step()
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        self.owes_step = sync_gradients

    def finish_step(self) -> None:
        """Take the step that is owed; nothing when none is."""
        if self.owes_step:
            self.owes_step = False
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """Return the norm that the gradients of the last step had over all ranks, as a number."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Take the step that is owed with gradients whose norm is at most `max_norm`.

        DeepSpeed clips while it steps. A norm in its configuration counts instead of `max_norm`.

        Args:
            max_norm: infinity only measures.
            norm_type: the p of the p-norm; DeepSpeed knows 2.

        Returns:
            The norm before clipping, 0-d; NaN where no step has been taken yet.
        """
        if float(norm_type) != 2.0:
            raise wrong_value("norm_type", norm_type, "DeepSpeed clips by the 2-norm", "Leave it at 2")
        if self.owes_step:
            self._set_limit(float(max_norm))
            if self._leaves_gradients_here():
                return self._clip_here()
            self.finish_step()
        norm = self.get_global_grad_norm()
        return torch.tensor(math.nan if norm is None else float(norm))

    def _set_limit(self, asked: float) -> None:
        configured = float(self.engine.config.get("gradient_clipping") or 0.0)
        if configured and math.isfinite(asked) and asked != configured:
            logger.warning_once(
                f"clip_grad_norm_ was called with max_norm={asked}, and DeepSpeed's configuration has "
                f"gradient_clipping={configured}, which counts. Set it to 'auto' to let max_norm count."
            )
        self._limit = configured or (asked if math.isfinite(asked) else 0.0)
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = self._limit

    def _leaves_gradients_here(self) -> bool:
        """Whether parameters have their gradients, whole, until the step: float32 without ZeRO."""
        return not hasattr(self.engine.optimizer, "clip_grad")

    def _clip_here(self) -> torch.Tensor:
        parameters = list(self.engine.module.parameters())
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(parameters, self._limit or math.inf)
        config = self.engine._config
        usual = config.gradient_clipping
        config.gradient_clipping = 0.0  # DeepSpeed's own limit is 1 where none is configured
        self.finish_step()
        config.gradient_clipping = usual
        return norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """DeepSpeed's optimizer: the engine steps, and clears gradients.

    Args:
        optimizer: of an engine.

    Attributes:
        take_step: takes the step that the engine owes.
    """

    belongs_to_engine = True
    """Whether the engine saves it and loads it."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.take_step: Callable[[], None] = no_step
        self.__has_overflow__ = hasattr(self.optimizer, "overflow")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients when it steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step that the engine owes; nothing while gradients accumulate.

        Args:
            closure: cannot be called by an engine.
        """
        if closure is not None:
            raise wrong_value("closure", closure, "DeepSpeed's engine steps without one", "Leave it out")
        if self.gradient_state.sync_gradients:
            self.take_step()
            self.num_updates += not self.step_was_skipped

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient was infinite or not a number."""
        return bool(self.__has_overflow__ and self.optimizer.overflow)  # type: ignore[attr-defined]


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps.

    Args:
        scheduler: of an engine.
        optimizers: the prepared optimizers that it belongs to.
    """

    belongs_to_engine = True

    def __init__(
        self, scheduler: Any, optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer]
    ) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps it with its optimizer."""


class DummyOptim:
    """Stands for the optimizer of DeepSpeed's configuration in `prepare`.

    Args:
        params: parameters, or groups of them, that are trained.
        lr: learning rate, where the configuration has "auto".
        weight_decay: likewise.
        **kwargs: further parameters of the optimizer, likewise, such as `betas`.
    """

    stands_for: ClassVar[Kind] = Kind.OPTIMIZER
    built_by: ClassVar[tuple[str, str]] = _DEEPSPEED

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def __getattr__(self, name: str) -> Any:
        """Say what to do where this is taken for an optimizer, by torch's schedulers for example."""
        raise AttributeError(
            f"DummyOptim has no {name}: DeepSpeed builds the optimizer in `prepare`. For a scheduler of "
            "torch pass DummyScheduler(optimizer, lr_scheduler_callable=...) to it, which builds one then."
        )


class DummyScheduler:
    """Stands for the scheduler of DeepSpeed's configuration in `prepare`.

    Args:
        optimizer: the optimizer whose learning rate it sets.
        total_num_steps: its length, where the configuration has "auto"; counted like that of any scheduler
            that is prepared.
        warmup_num_steps: likewise.
        lr_scheduler_callable: builds a scheduler for an optimizer, where the configuration has none.
        **kwargs: further parameters of the scheduler, such as `warmup_min_lr`.
    """

    stands_for: ClassVar[Kind] = Kind.SCHEDULER
    built_by: ClassVar[tuple[str, str]] = _DEEPSPEED

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
