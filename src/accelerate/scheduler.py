"""AcceleratedScheduler: a learning-rate scheduler that follows the optimizer's real steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState

StepPolicy = Literal["per_update"] | bool
"""`True`: once per process and update; "per_update": once per update; `False`: whenever called."""


class AcceleratedScheduler:
    """Steps a scheduler only when its optimizers have stepped.

    A schedule written for one process counts that process's batches. With N processes one update consumes N
    such batches, so the inner scheduler is stepped N times per update, except when each batch is split over
    the processes (`split_batches`) or when the schedule counts updates (`step_with_optimizer="per_update"`).

    Args:
        scheduler: a scheduler of `torch.optim.lr_scheduler`, or any object with `step`.
        optimizers: the prepared optimizers it belongs to; when one of them skipped its step, the schedule
            waits.
        step_with_optimizer: `True`, "per_update", or `False` to step whenever `step` is called.
        split_batches: whether each process gets a part of one batch instead of a whole one.
    """

    _is_accelerate_prepared = True  # other projects ask for it

    belongs_to_engine: bool = False
    """Whether an engine steps it, saves it and loads it."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: StepPolicy = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: list[AcceleratedOptimizer] = (
            [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        )
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        self.num_processes: int = AcceleratorState().num_processes
        self.total_steps: int | None = getattr(scheduler, "total_steps", None)

    @property
    def steps_per_update(self) -> int:
        """How often the inner scheduler steps for one update of the parameters."""
        if self.split_batches or self.step_with_optimizer == "per_update":
            return 1
        return self.num_processes

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule if the optimizers have stepped.

        Args:
            *args: passed to the inner scheduler (an epoch, a metric).
            **kwargs: likewise.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _ in range(self.steps_per_update):
            if self.total_steps is not None and self.scheduler.last_epoch >= self.total_steps:
                return  # Past its end OneCycleLR raises, and N steps per update may well get there.
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Return the last learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """Return the learning rates that the inner scheduler computes for its current step."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Print the learning rate, as the inner scheduler does."""
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
