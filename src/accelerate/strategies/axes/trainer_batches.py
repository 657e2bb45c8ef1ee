"""Number of batches of transformers' Trainer, whose ranks along the axis of sequences read whole batches.

The Trainer multiplies the length of its loader by the size of the axis, because DeepSpeed's loader yields
each batch in parts, and divides the number of items by it, because losses are those of parts. With torch each
rank reads a batch once, and the loss is that of whole sequences.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any


def count_whole_batches() -> None:
    """Lets the Trainer count whole batches in a run with `sp_backend="torch"`, if it is imported."""
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    size_of = getattr(trainer, "get_sp_size", None)
    if size_of is None or hasattr(size_of, "__wrapped__"):
        return
    samples_of = trainer.get_total_train_batch_size

    @wraps(size_of)
    def get_sp_size(self: Any) -> int:
        return 1 if _ranks_of_sequence(self) > 1 else size_of(self)

    @wraps(samples_of)
    def get_total_train_batch_size(self: Any, args: Any) -> int:
        return int(samples_of(self, args) // _ranks_of_sequence(self))

    trainer.get_sp_size, trainer.get_total_train_batch_size = get_sp_size, get_total_train_batch_size


def _ranks_of_sequence(trainer: Any) -> int:
    """Returns the number of ranks that divide sequences by torch, which is 1 in other runs."""
    parallelism: Any = getattr(trainer.accelerator, "parallelism_config", None)
    is_torch = parallelism is not None and parallelism.sequence_backend == "torch"
    return int(parallelism.sp_size) if is_torch else 1
