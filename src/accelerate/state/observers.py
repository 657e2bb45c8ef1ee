"""Observers of a run, whose methods are called at its events.

A feature that follows a run is an object with methods that are named like events. It is added to the
observers of the run, or to those of one optimizer for its steps and state dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from accelerate.state.shared import services, step_clock

Methods: TypeAlias = tuple[Callable[..., object], ...]


class Observers:
    """Methods of observers by event, which are chosen when an observer is added.

    An observer has the methods that it needs. They are called in the order in which observers were added, but
    those of `before_backward` in reverse order: later observers surround earlier ones.

    Args:
        observers: Observers to add.

    Attributes:
        all: The observers.
        pass_begun: Called with a loader at the beginning of a pass over it.
        before_read: Called without arguments before a loader reads a batch.
        before_move: Called without arguments before a batch is moved to a device.
        batch_read: Called with the number of rows of a batch before the loop gets it.
        batch_used: Called with a loader when the loop has used a batch, in the thread of the loop.
        pass_ended: Called with a loader at the end of a pass over it.
        loss_computed: Called with the loss of a micro-batch.
        before_backward: Called with the scaled loss and the keyword arguments of a backward pass.
        after_backward: Called without arguments after a backward pass.
        norm_computed: Called with the norm of the gradients before they are clipped.
        before_step: Called with an optimizer before its step.
        after_update: Called with the optimizer, not for all of a run, after a step that updated parameters.
        after_step: Called with an optimizer and the number of its updates after a step, also if it fails.
        before_state_dict: Called without arguments before an optimizer returns its state dict.
        before_load: Called with a state dict before an optimizer loads it.
        after_load: Called without arguments after an optimizer has loaded a state dict.
        prepared: Called without arguments after objects were prepared.
        before_save: Called without arguments before the state of the run is saved.
        loaded: Called with the number of optimizer steps after the state of the run was loaded.
        awaited: Called without arguments where the run waits for saves in the background.
        ended: Called without arguments at the end of training, before the process group is closed.
    """

    pass_begun: Methods = ()
    before_read: Methods = ()
    before_move: Methods = ()
    batch_read: Methods = ()
    batch_used: Methods = ()
    pass_ended: Methods = ()
    loss_computed: Methods = ()
    before_backward: Methods = ()
    after_backward: Methods = ()
    norm_computed: Methods = ()
    before_step: Methods = ()
    after_update: Methods = ()
    after_step: Methods = ()
    before_state_dict: Methods = ()
    before_load: Methods = ()
    after_load: Methods = ()
    prepared: Methods = ()
    before_save: Methods = ()
    loaded: Methods = ()
    awaited: Methods = ()
    ended: Methods = ()

    def __init__(self, observers: Iterable[Any] = ()) -> None:
        self.all: tuple[Any, ...] = ()
        for observer in observers:
            self.add(observer)

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled Accelerator uses the observers of its process.
        return (run_observers, ()) if step_clock in self.all else (Observers, (self.all,))

    def add(self, observer: Any) -> None:
        """Calls the methods of an observer from now on."""
        self.all = (*self.all, observer)
        for event in _EVENTS:
            if (method := getattr(observer, event, None)) is not None:
                methods = getattr(self, event)
                is_outer = event == "before_backward"
                setattr(self, event, (method, *methods) if is_outer else (*methods, method))

    def put(self, observer: Any) -> None:
        """Adds an observer in place of an earlier one of its class."""
        for earlier in self.all:
            if type(earlier) is type(observer):
                self.remove(earlier)
        self.add(observer)

    def remove(self, observer: Any) -> None:
        """Ends the calls of an observer."""
        others = [each for each in self.all if each is not observer]
        self.all = ()
        for event in _EVENTS:
            setattr(self, event, ())
        for other in others:
            self.add(other)

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Returns a context for reads ahead of the loop, which has not used the batch before."""
        kept, self.batch_used = self.batch_used, ()
        try:
            yield
        finally:
            self.batch_used = kept


_EVENTS = tuple(Observers.__annotations__)


def run_observers() -> Observers:
    """Returns the observers of the run, which the step clock is the first of."""
    return services.get(Observers, lambda: Observers([step_clock]))
