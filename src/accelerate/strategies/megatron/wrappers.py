"""Megatron-LM's optimizer and scheduler as the rest of a script knows them; the engine steps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.strategies.bundle import Kind


class MegatronLMDummyScheduler:
    """Stands for a scheduler that Megatron-LM builds, and says how long it runs.

    Args:
        optimizer: the one it is for.
        total_num_steps: steps of the whole training, counted in batches of one process.
        warmup_num_steps: steps over which the learning rate rises first, counted likewise.
        **kwargs: kept, for scripts that look them up.
    """

    stands_for: ClassVar[Kind] = Kind.SCHEDULER
    built_by: ClassVar[tuple[str, str]] = ("Megatron-LM", "megatron_lm_plugin=MegatronLMPlugin(...)")

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Megatron-LM's optimizer: a call of the engine has stepped it and cleared its gradients.

    Args:
        optimizer: Megatron-LM's.
    """

    belongs_to_engine: bool = True

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine has done it.

        Args:
            set_to_none: taken for compatibility.
        """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count the step that the engine has done.

        Args:
            closure: taken for compatibility.
        """
        self.num_updates += not self.step_was_skipped

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients were not finite."""
        return bool(getattr(self.optimizer, "skipped_iter", False))


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Megatron-LM's scheduler: a call of the engine has stepped it.

    Args:
        scheduler: Megatron-LM's.
        optimizers: the prepared one it is for.
    """

    belongs_to_engine: bool = True

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has done it.

        Args:
            *args: taken for compatibility.
            **kwargs: likewise.
        """

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizers[0].param_groups]
