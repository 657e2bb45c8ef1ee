"""What stands for the optimizer and the scheduler that DeepSpeed builds from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from accelerate.strategies.bundle import Kind


class DummyOptim:
    """Stands for the optimizer of DeepSpeed's configuration in `prepare`.

    Args:
        params: parameters, or groups of them, that are trained.
        lr: learning rate, where the configuration has "auto".
        weight_decay: likewise.
        **kwargs: further parameters of the optimizer, likewise, such as `betas`.
    """

    stands_for: ClassVar[Kind] = Kind.OPTIMIZER

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
