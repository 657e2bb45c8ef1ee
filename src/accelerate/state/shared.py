"""The dictionary behind each state class: every instance of the class reads and writes the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar


class ThreadLocalSharedDict(threading.local):
    """A class attribute that is another dictionary in each thread.

    Some XLA runtimes run several replicas as threads of one process; each replica has a state of its own.

    Args:
        thread_local: accepted for older callers; the dictionary is always one for each thread.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value


# Only XLA has replicas that are threads; elsewhere helper threads must see the state of the process.
SharedDict: Callable[[], Any] = dict if find_spec("torch_xla") is None else ThreadLocalSharedDict


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and do nothing: what a decorated function becomes on the other processes."""


class SharedState:
    """A handle on one shared dictionary: the attributes of all instances of a class are its entries.

    A subclass sets `_shared_state` and fills it when its first instance is built.
    """

    _shared_state: ClassVar[dict[str, Any]]

    _pickled: ClassVar[tuple[str, ...]] = ()
    """Entries that a pickle carries, for a process that has no state of its own (a worker of a loader)."""

    def __init__(self) -> None:
        self.__dict__ = self._shared_state

    def __getattr__(self, name: str) -> Any:
        cls = type(self).__name__
        if name.startswith("__") or self._shared_state:
            raise AttributeError(f"{cls!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{cls!r} object has no attribute {name!r}: the shared state is empty, most likely because "
            f"`{cls}._reset_state()` was called after this object was made. Build a new one."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or an unpickled handle joins the state of the process it is made in, where there is one.
        entries = {name: self.__dict__[name] for name in self._pickled if name in self.__dict__}
        return _attach, (type(self), entries)

    @property
    def initialized(self) -> bool:
        """Whether the first instance has filled the shared state."""
        return bool(self._shared_state)


def _attach(cls: type[SharedState], entries: dict[str, Any]) -> SharedState:
    handle = object.__new__(cls)
    SharedState.__init__(handle)
    if entries and not handle.initialized:
        handle.__dict__ = entries
    return handle
