"""Number of batches of transformers' Trainer, whose ranks along the axis of sequences read whole batches.

The Trainer multiplies the length of its loader by the size of the axis, because DeepSpeed's loader yields
each batch in parts, and divides the number of items by it and by that of context parallelism, because losses
are those of parts. With torch each rank reads a batch once, and the loss is that of whole sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any


def count_whole_batches() -> None:
    """Lets the Trainer count whole batches in a run with `sp_backend="torch"`, if it is imported."""
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    size_of = getattr(trainer, "get_sp_size", None)
    if size_of is None or hasattr(size_of, "__wrapped__"):
        return
    names = [name for name in ("get_cp_size", "get_sp_size") if hasattr(trainer, name)]
    samples_of = trainer.get_total_train_batch_size

    @wraps(samples_of)
    def get_total_train_batch_size(self: Any, args: Any) -> int:
        return int(samples_of(self, args) // _ranks_of_sequence(self))

    trainer.get_total_train_batch_size = get_total_train_batch_size
    for name in names:
        setattr(trainer, name, _of_whole_batches(getattr(trainer, name)))


def _of_whole_batches(size_of: Callable[[Any], int]) -> Callable[[Any], int]:
    """Returns a method that returns the size of an axis, or 1 if torch divides sequences along it."""

    @wraps(size_of)
    def size(self: Any) -> int:
        return 1 if _ranks_of_sequence(self) > 1 else size_of(self)

    return size


def _ranks_of_sequence(trainer: Any) -> int:
    """Returns the number of ranks that divide sequences by torch, which is 1 in other runs."""
    parallelism: Any = getattr(trainer.accelerator, "parallelism_config", None)
    is_torch = parallelism is not None and parallelism.sequence_backend == "torch"
    return int(parallelism.sp_size * parallelism.cp_size) if is_torch else 1
