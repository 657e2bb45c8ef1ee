"""Closing of open generators at the exit of the interpreter, while the modules that they use still work.

Iterators of loaders and `Accelerator.profile` are decorated with `closed_at_exit`.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from accelerate.state.shared import services

P = ParamSpec("P")
Item = TypeVar("Item")


class _OpenGenerators(WeakSet[Generator[Any, None, None]]):
    """Set of the generators of this process to close at exit."""


def closed_at_exit(
    make: Callable[P, Generator[Item, None, None]],
) -> Callable[P, Generator[Item, None, None]]:
    """Decorates a generator function so that its open generators are closed when the interpreter exits."""

    @functools.wraps(make)
    def register(*args: P.args, **kwargs: P.kwargs) -> Generator[Item, None, None]:
        generator = make(*args, **kwargs)
        services.of_process(_OpenGenerators).add(generator)
        return generator

    return register


@atexit.register
def _close_all() -> None:
    for generator in list(services.of_process(_OpenGenerators)):
        if inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:  # another thread may run it
            generator.close()
