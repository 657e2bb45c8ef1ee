"""Shared state of all instances of a state class, and the services and observers of the process and the run.

All packages after `state` register their long-lived objects in `services`. A feature that follows a run is an
object with methods that are named like events, and is added to the observers of the run, or to those of one
optimizer for its steps and state dicts.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Any, ClassVar, TypeAlias, TypeVar

from accelerate.monitoring import Event, RecordQueue, StepClock

Service = TypeVar("Service")


class ThreadLocalSharedDict(threading.local):
    """Class attribute with a separate dictionary in each thread.

    Some XLA runtimes run several replicas as threads of one process, and each replica has its own state.

    Args:
        thread_local: Has no effect, because each thread always has its own dictionary. The default is False.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value


# Only XLA runs replicas as threads. Otherwise all threads of a process use one state.
SharedDict: Callable[[], Any] = dict if find_spec("torch_xla") is None else ThreadLocalSharedDict


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing with any arguments, in place of a decorated function on the other ranks."""


class SharedState:
    """Base class of states whose instances share their attributes in one dictionary.

    A subclass sets `_shared_state`, and fills it when its first instance is created.
    """

    _shared_state: ClassVar[dict[str, Any]]

    _pickled: ClassVar[tuple[str, ...]] = ()
    """Entries that are pickled, for a process without a state, such as a DataLoader worker."""

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
        # A copied or unpickled instance uses the state of the process that copies or unpickles it, if any.
        entries = {name: self.__dict__[name] for name in self._pickled if name in self.__dict__}
        return _attach, (type(self), entries)

    @property
    def initialized(self) -> bool:
        """True after the first instance has filled the shared state."""
        return bool(self._shared_state)


def _attach(cls: type[SharedState], entries: dict[str, Any]) -> SharedState:
    instance = object.__new__(cls)
    SharedState.__init__(instance)
    if entries and not instance.initialized:
        instance.__dict__ = entries
    return instance


class ProcessServices:
    """Registry of the services of a process, with one object of each class, created at its first use.

    A package registers an object under its class (the transport, the consensus, the hang watcher, the
    background writer), so `state` does not import these packages. `PartialState._reset_state()` ends and
    removes the services of the run. Services of the process last until it ends.
    """

    of_run: ClassVar[dict[type[Any], Any]] = SharedDict()  # services of the run by their class
    _group_users: ClassVar[dict[type[Any], None]] = SharedDict()
    _closers: ClassVar[dict[type[Any], Callable[[], None]]] = SharedDict()
    _endings: ClassVar[dict[type[Any], Callable[[], None]]] = SharedDict()

    def __init__(self) -> None:
        self._of_process: dict[type[Any], Any] = {}
        self._counters: dict[str, Iterator[int]] = {}
        self.groups_opened = 0  # number of default process groups that this process has opened
        # Process that uses the default group. A fork inherits the group, and does not close it.
        self.group_owner: int | None = None
        self.closing_process: int | None = None  # which has registered a service that is closed
        # Restart generation that the ranks agreed on, or None if this was not necessary.
        self.generation: str | None = None
        # Functions that return a context for the time in which this rank waits for the others to open the
        # default group. Their arguments are the topology and `groups_opened`.
        self.while_opening: list[Callable[[Any, int], AbstractContextManager[object]]] = []
        # Barrier that `wait_for_everyone` calls while a group is open. None waits without a record.
        self.barrier: Callable[[], None] | None = None

    def find(self, kind: type[Service]) -> Service | None:
        """Returns the service of the run of this class, or None."""
        return self.of_run.get(kind)

    def get(self, kind: type[Service], make: Callable[[], Service], *, uses_group: bool = False) -> Service:
        """Returns the service of the run of this class, which the first call creates and registers."""
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
        """Registers a service of the run, replaces a previous one of its class, and returns it.

        Args:
            uses_group: Whether the service is removed when another default process group is opened.
            close: Called before the default process group is closed, or at exit without one.
            end: Called when the state is reset.
        """
        self.of_run[kind] = service
        if uses_group:
            self._group_users[kind] = None
        if close is not None:
            self._closers[kind] = close
            self.closing_process = os.getpid()
        if end is not None:
            self._endings[kind] = end
        return service

    def remove(self, kind: type[Service]) -> Service | None:
        """Removes the service of the run of this class, and returns it, or None."""
        for registered in (self._group_users, self._closers, self._endings):
            registered.pop(kind, None)
        return self.of_run.pop(kind, None)  # type: ignore[no-any-return]

    def of_process(self, kind: type[Service]) -> Service:
        """Returns the service of the process of this class, which the first call creates."""
        if kind not in self._of_process:
            self._of_process[kind] = kind()
        return self._of_process[kind]  # type: ignore[no-any-return]

    def next_number(self, purpose: str) -> int:
        """Returns the number of previous calls for a purpose in this process, also across resets."""
        return next(self._counters.setdefault(purpose, count()))

    def before_close(self) -> None:
        """Closes services while the default process group is still open."""
        for close in list(self._closers.values()):
            close()

    def own_group(self) -> None:
        """Makes this process the user of the open default group, which it closes at exit.

        Services that used another group are removed.
        """
        self.group_owner = os.getpid()
        for kind in list(self._group_users):
            self.remove(kind)

    def reset(self) -> None:
        """Ends and removes the services of the run."""
        for end in list(self._endings.values()):
            end()
        for registered in (self.of_run, self._group_users, self._closers, self._endings):
            registered.clear()


services = ProcessServices()
"""Services of this process."""


@dataclass
class Leader:
    """Service that says whether this replica group is the one that writes files and prints.

    A run without replica groups has none.
    """

    is_leader: bool
    wait_for_others: Callable[[], None]


step_clock = services.of_process(StepClock)
"""Clock of the phases of a training step, the same object for the lifetime of the process."""

run_records = services.of_process(RecordQueue)
"""Queue of the records of this process, which the run monitor writes to files."""


def record_event(name: str, text: str) -> None:
    """Adds an event of this rank to the records of the run."""
    run_records.append(Event(time=time.time(), name=name, step=step_clock.number, text=text))


class WeakReference:
    """Weak reference that is copied and pickled with its object.

    An attribute of an object that refers back to its owner would keep both until the next garbage collection.

    Attributes:
        find: Returns the object, or None after it was deleted.
    """

    __slots__ = ("__weakref__", "find")

    def __init__(self, obj: Any) -> None:
        self.find: Callable[[], Any] = weakref.ref(obj)

    def __call__(self) -> Any:
        """Returns the object, or None after it was deleted."""
        return self.find()

    def __getstate__(self) -> Any:
        return (self.find(),)

    def __setstate__(self, state: Any) -> None:
        self.find = weakref.ref(state[0])


Notify: TypeAlias = Callable[..., object]
"""Function that calls the methods of all observers of an event."""


class Observers:
    """Observers of a run or an optimizer, whose methods are called by one function for each event.

    An observer has the methods that it needs, which are chosen when it is added. They are called in the order
    in which observers were added, but those of `before_backward` in reverse order: later observers surround
    earlier ones.

    Args:
        observers: Observers to add.

    Attributes:
        is_ahead: True while loaders read ahead of the loop, which has not used the batch before.
        pass_begun: Called with a loader at the beginning of a pass over it.
        before_read: Called with a loader before it reads the next batch, in the thread of the loop. The loop
            has used the batch before, unless `is_ahead`.
        before_move: Called without arguments before a batch is moved to a device.
        batch_read: Called with the number of rows of a batch before the loop gets it.
        pass_ended: Called with a loader at the end of a pass over it.
        loss_computed: Called with the loss of a micro-batch.
        before_backward: Called with the scaled loss and the keyword arguments of a backward pass.
        after_backward: Called without arguments after a backward pass.
        norm_computed: Called with the norm of the gradients before they are clipped.
        before_step: Called with an optimizer before its step.
        after_update: Called with the optimizer, not for all of a run, after a step that updated parameters.
        after_step: Called with an optimizer and the number of its updates after a step, also if it fails.
        group_added: Called with an optimizer after a parameter group was added to it.
        before_state_dict: Called without arguments before an optimizer returns its state dict.
        before_load: Called with a state dict before an optimizer loads it.
        after_load: Called without arguments after an optimizer has loaded a state dict.
        prepared: Called without arguments after objects were prepared.
        before_save: Called without arguments before the state of the run is saved.
        before_load_state: Called without arguments before the state of the run is loaded.
        checkpointed: Called with the folder and the number of optimizer steps of a checkpoint, after it was
            committed, in the thread that has saved it, or loaded.
        loaded: Called with the number of optimizer steps after the state of the run was loaded.
        awaited: Called without arguments where the run waits for saves in the background.
        ended: Called without arguments at the end of training, before the process group is closed.
    """

    pass_begun: Notify = staticmethod(do_nothing)
    before_read: Notify = staticmethod(do_nothing)
    before_move: Notify = staticmethod(do_nothing)
    batch_read: Notify = staticmethod(do_nothing)
    pass_ended: Notify = staticmethod(do_nothing)
    loss_computed: Notify = staticmethod(do_nothing)
    before_backward: Notify = staticmethod(do_nothing)
    after_backward: Notify = staticmethod(do_nothing)
    norm_computed: Notify = staticmethod(do_nothing)
    before_step: Notify = staticmethod(do_nothing)
    after_update: Notify = staticmethod(do_nothing)
    after_step: Notify = staticmethod(do_nothing)
    group_added: Notify = staticmethod(do_nothing)
    before_state_dict: Notify = staticmethod(do_nothing)
    before_load: Notify = staticmethod(do_nothing)
    after_load: Notify = staticmethod(do_nothing)
    prepared: Notify = staticmethod(do_nothing)
    before_save: Notify = staticmethod(do_nothing)
    before_load_state: Notify = staticmethod(do_nothing)
    checkpointed: Notify = staticmethod(do_nothing)
    loaded: Notify = staticmethod(do_nothing)
    awaited: Notify = staticmethod(do_nothing)
    ended: Notify = staticmethod(do_nothing)

    def __init__(self, observers: Iterable[Any] = ()) -> None:
        self.all: tuple[Any, ...] = ()
        self.is_ahead = False
        self._methods: dict[str, tuple[Notify, ...]] = {}
        for observer in observers:
            self.add(observer)

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled Accelerator uses the observers of its process.
        return (run_observers, ()) if step_clock in self.all else (Observers, (self.all,))

    def add(self, observer: object) -> None:
        """Calls the methods of an observer from now on."""
        self.all = (*self.all, observer)
        for event in _EVENTS:
            if (method := getattr(observer, event, None)) is not None:
                methods = self._methods.get(event, ())
                is_outer = event == "before_backward"
                self._methods[event] = (method, *methods) if is_outer else (*methods, method)
                setattr(self, event, _caller_of(self._methods[event]))

    def put(self, observer: object) -> None:
        """Adds an observer in place of an earlier one of its class."""
        for earlier in self.all:
            if type(earlier) is type(observer):
                self.remove(earlier)
        self.add(observer)

    def remove(self, observer: object) -> None:
        """Ends the calls of an observer."""
        others = [each for each in self.all if each is not observer]
        self.all, self._methods = (), {}
        for event in _EVENTS:
            setattr(self, event, do_nothing)
        for other in others:
            self.add(other)

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Returns a context for reads ahead of the loop, which has not used the batch before."""
        before, self.is_ahead = self.is_ahead, True
        try:
            yield
        finally:
            self.is_ahead = before


_EVENTS = tuple(Observers.__annotations__)


def _caller_of(methods: tuple[Notify, ...]) -> Notify:
    """Returns a function that calls methods in their order, or the only method."""
    if len(methods) == 1:
        return methods[0]

    def call_all(*arguments: object) -> None:
        for method in methods:
            method(*arguments)

    return call_all


def run_observers() -> Observers:
    """Returns the observers of the run, which the step clock is the first of."""
    return services.get(Observers, lambda: Observers([step_clock]))
