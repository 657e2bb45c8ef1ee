"""Wrapper of a learning-rate scheduler that steps after updates of its optimizers, returned by `prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Literal

import torch

from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState

logger = get_logger(__name__)

TOLERANCE = 0.1
"""Fraction of a schedule that training may continue after its end without a warning."""

ROUNDING = 1e-6
"""Largest relative difference of two learning rates that are regarded as equal."""

# `map` with an attrgetter runs no bytecode for each optimizer.
_updates = attrgetter("num_updates")
_pass_and_skip = attrgetter("last_pass", "step_was_skipped")

StepPolicy = Literal["per_update"] | bool
"""Policy of steps.

True steps once per process and update, "per_update" once per update, and False in each call. A call by epoch
is one step with each policy.
"""


class _ScheduleEndWarning:
    """Logs one warning if optimizers continue to step after the end of their schedule."""

    def __init__(self) -> None:
        self.has_warned = False
        self.had_rates = False
        self.length = 0
        self.updates_after = 0

    def check(self, scheduler: Any, optimizers: Sequence[AcceleratedOptimizer], steps: int) -> None:
        """Checks the inner scheduler after an optimizer step and before its own steps."""
        if self.has_warned:
            return
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        taken = getattr(scheduler, "last_epoch", None)
        if not isinstance(taken, int) or any(isinstance(rate, torch.Tensor) for rate in rates):
            return  # reading the values of tensors would synchronize with the device
        is_zero = self.had_rates and not any(rates)
        self.had_rates = self.had_rates or any(rates)
        length = _known_length(scheduler, rates)
        if not is_zero and (length is None or taken < length):
            self.updates_after = 0
            return
        if not self.updates_after:
            self.length = taken if length is None else length
        self.updates_after += 1
        # The last batches of epochs are padded to whole steps, so the schedule may end a little early.
        if self.updates_after > 1 and self.updates_after * steps > self.length * TOLERANCE:
            self.has_warned = True
            state = "all learning rates are 0" if is_zero else "its last step is over"
            updates = max((optimizer.num_updates for optimizer in optimizers), default=0)
            logger.warning(
                f"A learning-rate schedule of {self.length} steps has ended, and training continues: "
                f"{state}. A prepared scheduler steps {steps} times per optimizer step, once for each of "
                f"{steps} processes, so it took {taken} steps in {updates - 1} optimizer steps. If the "
                "schedule is counted in optimizer steps, pass step_scheduler_with_optimizer='per_update' to "
                "Accelerator; if not, give it more steps."
            )


def _known_length(scheduler: object, rates: Sequence[float]) -> int | None:
    """Returns the number of steps of a torch schedule, or None for a warm-up or one without a length."""
    for name in ("total_steps", "T_max", "total_iters"):
        length = getattr(scheduler, name, None)
        if isinstance(length, int):
            # A schedule that ends at or above its initial learning rates is a warm-up.
            bases = zip(rates, getattr(scheduler, "base_lrs", ()), strict=False)
            is_warm = all(rate >= base * (1 - ROUNDING) for rate, base in bases)
            return None if name == "total_iters" and is_warm else length
    return None


class AcceleratedScheduler:
    """Wrapper of a scheduler that steps only after its optimizers have updated parameters.

    A schedule written for one process counts the batches of that process. With N processes, one update uses N
    such batches, so the inner scheduler steps N times per update. It steps once per update if each batch is
    split between the processes (`split_batches`), or if the schedule counts updates
    (`step_with_optimizer="per_update"`).

    A schedule by epoch has as many epochs on any number of processes. So a call is one step of the inner
    scheduler, also within an accumulation window, if it has an argument (a metric or an epoch), or if it
    follows more than one update, or the end of the pass over a loader in which the optimizer stepped.

    Args:
        scheduler: Scheduler of `torch.optim.lr_scheduler`, or any object with `step`.
        optimizers: Prepared optimizers of the scheduler. If one of them skips its step, the scheduler does
            not step.
        step_with_optimizer: True, "per_update", or False to step in each call of `step`.
        split_batches: Whether each process gets a part of a batch instead of a whole batch.

    Attributes:
        updates_at_call: Number of updates of each optimizer at the last call of `step`.
    """

    _is_accelerate_prepared = True  # other projects read it

    belongs_to_engine: bool = False
    """True if an engine, such as that of DeepSpeed, steps, saves and loads the scheduler."""

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
        self.updates_at_call: Sequence[int] = ()
        self._passes_at_call: list[tuple[int, bool]] = []
        self.record_call()
        self._end_warning = _ScheduleEndWarning()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the inner scheduler if the optimizers have updated parameters.

        Args:
            *args: Arguments of the step of the inner scheduler, such as an epoch or a metric.
            **kwargs: Keyword arguments of the step of the inner scheduler.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        steps, is_due = self.num_processes, self.gradient_state.sync_gradients
        if self.split_batches or self.step_with_optimizer == "per_update":
            steps = 1
        updates, passes = list(map(_updates, self.optimizers)), list(map(_pass_and_skip, self.optimizers))
        if passes != self._passes_at_call or sum(updates) > sum(self.updates_at_call) + 1:
            skipped = [was_skipped for _, was_skipped in passes]
            if self._is_by_epoch(skipped):
                steps, is_due = 1, True
            elif True in skipped:
                is_due = False
            self._passes_at_call = [(number, False) for number, _ in passes]
        self.updates_at_call = updates
        if (args or kwargs) and any(value is not None for value in (*args, *kwargs.values())):
            self.scheduler.step(*args, **kwargs)
            return
        if not is_due:
            return
        if steps == 1 and self.total_steps is None:
            self.scheduler.step(*args, **kwargs)
        else:
            self._step_several(steps, *args, **kwargs)

    def _step_several(self, steps: int, *args: Any, **kwargs: Any) -> None:
        """Steps the inner scheduler several times, but not after the end of a schedule of a fixed length."""
        if steps > 1:
            self._end_warning.check(self.scheduler, self.optimizers, steps)
        for _ in range(steps):
            if self.total_steps is not None and self.scheduler.last_epoch >= self.total_steps:
                return  # OneCycleLR raises an error after its end, which N steps per update may reach
            self.scheduler.step(*args, **kwargs)

    def record_call(self, updates: Sequence[int] | None = None) -> None:
        """Sets `updates_at_call`, from which the next call of `step` counts updates.

        Args:
            updates: The numbers in a checkpoint. By default they are those of this moment.
        """
        self.updates_at_call = updates or [optimizer.num_updates for optimizer in self.optimizers]
        self._passes_at_call = [(optimizer.last_pass, False) for optimizer in self.optimizers]

    def _is_by_epoch(self, skipped: Sequence[bool]) -> bool:
        """Returns whether the optimizers have stepped more than once since the last call, or in a whole pass.

        Of several optimizers, the one with the fewest steps counts, so that a scheduler of a GAN, whose
        optimizers take turns, is not regarded as one by epoch. The number of updates alone does not show
        that an epoch of one update has ended, but the end of its pass does.
        """
        fewest, has_ended = 0, False  # steps of the optimizers that have any, and whether a pass has ended
        calls = zip(self.optimizers, skipped, self.updates_at_call, self._passes_at_call, strict=False)
        for optimizer, was_skipped, updates, (number, _) in calls:
            steps = optimizer.num_updates - updates
            if steps:
                steps += was_skipped  # an update, and then one that was skipped
                fewest = min(fewest, steps) if fewest else steps
            if optimizer.last_pass and optimizer.last_pass != number:
                has_ended = has_ended or self.gradient_state.is_behind(optimizer.last_pass)
        return fewest > 1 or (has_ended and not any(skipped))

    def get_last_lr(self) -> Any:
        """Returns the last learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the inner scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """Returns the learning rates that the inner scheduler computes for its current step."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Prints the learning rate, as the inner scheduler does."""
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
