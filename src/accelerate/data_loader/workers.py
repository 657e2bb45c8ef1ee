"""Start the workers of a loader so that each can be asked for its stack, and say that they were started."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from accelerate.base import stack_dumps


class WorkersObserver:
    """Is told of worker processes when they have been started: a service of the run."""

    def follow(self, iterator: Any) -> None:
        """Take note of workers; called by the thread that will wait for them.

        Args:
            iterator: torch's, with its workers.
        """


def make_askable(loader: DataLoader[Any]) -> Callable[[int], None] | None:
    """Let the workers that are started next tell where they stand; called before they are.

    Args:
        loader: whose workers they are.

    Returns:
        The `worker_init_fn` to start them with: the loader's own where they are forked.
    """
    stack_dumps.offer()
    return loader.worker_init_fn if _forks(loader) else stack_dumps.Offering(loader.worker_init_fn)


def _forks(loader: DataLoader[Any]) -> bool:
    context = loader.multiprocessing_context
    if context is not None:
        return bool(context.get_start_method() == "fork")
    # The first of all is the one that is used when none was chosen; to ask otherwise chooses it for good.
    chosen = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return chosen == "fork"
