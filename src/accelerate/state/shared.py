"""What all code of a process shares: the entries of each state class, and the services of the run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from itertools import count
from typing import Any, ClassVar, TypeVar

from accelerate.monitoring import Event, RecordQueue, StepClock

Service = TypeVar("Service")


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


# Only XLA has replicas that are threads; otherwise helper threads must see the state of the process.
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
            f"`{cls}._reset_state()` was called after this object was made. Create a new `Accelerator` or "
            f"`{cls}`."
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


class ProcessServices:
    """What this process holds for a run besides its state: one object of each class, made at its first use.

    A package registers an object under its class (the transport, the consensus, the watcher of hangs, the
    background writer), so `state` imports none of them. `PartialState._reset_state()` ends and forgets the
    services of the run; those of the process last until it ends.
    """

    of_run: ClassVar[dict[type[Any], Any]] = SharedDict()  # services of the run by their class
    _group_users: ClassVar[dict[type[Any], None]] = SharedDict()
    _closers: ClassVar[dict[type[Any], Callable[[], None]]] = SharedDict()
    _endings: ClassVar[dict[type[Any], Callable[[], None]]] = SharedDict()

    def __init__(self) -> None:
        self._of_process: dict[type[Any], Any] = {}
        self._counters: dict[str, Iterator[int]] = {}
        self.groups_opened = 0  # number of default process groups that this process has opened
        # The process that uses the default group: a fork inherits the group, and does not close it.
        self.group_owner: int | None = None
        # The restart generation that the ranks agreed on; None where they did not have to.
        self.generation: str | None = None
        # Contexts that this rank enters while it waits for the others to open the default group; each gets
        # the topology and `groups_opened`.
        self.while_opening: list[Callable[[Any, int], AbstractContextManager[object]]] = []
        # What `wait_for_everyone` calls while a group is open; None waits without a record.
        self.barrier: Callable[[], None] | None = None

    def find(self, kind: type[Service]) -> Service | None:
        return self.of_run.get(kind)

    def get(self, kind: type[Service], make: Callable[[], Service], *, uses_group: bool = False) -> Service:
        """Return the service of the run of this class; the first call makes and registers it."""
        service = self.find(kind)
        return self.put(kind, make(), uses_group=uses_group) if service is None else service

    def put(
        self,
        kind: type[Service],
        service: Service,
        *,
        uses_group: bool = False,
        close: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> Service:
        """Register a service of the run, in place of the one of this class, and return it.

        One that `uses_group` is forgotten when another default process group takes the place of that one.
        `close` is called before that group is closed, `end` when the state is reset.
        """
        self.of_run[kind] = service
        if uses_group:
            self._group_users[kind] = None
        if close is not None:
            self._closers[kind] = close
        if end is not None:
            self._endings[kind] = end
        return service

    def remove(self, kind: type[Service]) -> Service | None:
        """Forget the service of the run of this class, and return it."""
        for registered in (self._group_users, self._closers, self._endings):
            registered.pop(kind, None)
        return self.of_run.pop(kind, None)  # type: ignore[no-any-return]

    def of_process(self, kind: type[Service]) -> Service:
        """Return the service of the process of this class; the first call makes it, without arguments."""
        if kind not in self._of_process:
            self._of_process[kind] = kind()
        return self._of_process[kind]  # type: ignore[no-any-return]

    def next_number(self, purpose: str) -> int:
        """Count the calls for a purpose in this process, from 0; a reset does not start again."""
        return next(self._counters.setdefault(purpose, count()))

    def before_close(self) -> None:
        """Close services while the default process group is still open."""
        for close in list(self._closers.values()):
            close()

    def own_group(self) -> None:
        """Let this process use the open default group and close it at exit; forget what held another one."""
        self.group_owner = os.getpid()
        for kind in list(self._group_users):
            self.remove(kind)

    def reset(self) -> None:
        for end in list(self._endings.values()):
            end()
        for registered in (self.of_run, self._group_users, self._closers, self._endings):
            registered.clear()


services = ProcessServices()
"""Those of this process."""

step_clock = services.of_process(StepClock)
"""Counts the seconds of each phase of a training step; the object is the same as long as the process runs."""

run_records = services.of_process(RecordQueue)
"""Records of what happens in this process, for those that write them."""


def note_event(name: str, text: str) -> None:
    """Add an event of this rank to the records of the run."""
    run_records.append(Event(time=time.time(), name=name, step=step_clock.number, text=text))
