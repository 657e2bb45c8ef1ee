"""Close generators that are open when the interpreter exits, while the modules that they use still work."""

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
    """The generators of this process that are to be closed."""


def closed_at_exit(
    make: Callable[P, Generator[Item, None, None]],
) -> Callable[P, Generator[Item, None, None]]:
    """Decorate a generator function: what it returns is closed when the interpreter exits, if it is open."""

    @functools.wraps(make)
    def register(*args: P.args, **kwargs: P.kwargs) -> Generator[Item, None, None]:
        generator = make(*args, **kwargs)
        services.of_process(_OpenGenerators).add(generator)
        return generator

    return register


@atexit.register
def _close_all() -> None:
    for generator in list(services.of_process(_OpenGenerators)):
        if inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:  # in another thread
            generator.close()
