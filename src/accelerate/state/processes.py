"""ProcessControl: run, print, wait and split by process, for the states and `Accelerator`."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch

from accelerate.base import ConfigurationError, wrong_value
from accelerate.state import process_group
from accelerate.state.shared import do_nothing, services

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_logger = logging.getLogger(__name__)


class ProcessControl:
    """What depends on which process this is.

    Stateless: a class that mixes it in has `num_processes`, `process_index`, `local_process_index`, `device`.
    """

    if TYPE_CHECKING:

        @property
        def num_processes(self) -> int: ...
        @property
        def process_index(self) -> int: ...
        @property
        def local_process_index(self) -> int: ...
        @property
        def device(self) -> torch.device: ...

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until all processes have come here. Called on every rank; one process does not wait.

        Raises:
            StateError: the process group is closed.
        """
        if self.num_processes > 1 and services.barrier is not None and process_group.is_open():
            services.barrier()
        elif self.num_processes > 1:
            process_group.wait(self.device)

    @contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Iterator[T]:
        """Give this process its share of inputs that every process holds, without communication.

        Args:
            inputs: a list, tuple, tensor, array or dataset, divided along its first dimension, or a
                dictionary of such, all of one length. Where they do not divide evenly, the first processes
                take one more.
            apply_padding: whether short shares are filled with their last element, to be gathered.

        Yields:
            The share, in a container of the same kind; with one process the inputs themselves.

        Raises:
            ConfigurationError: the inputs have no length, or those of a dictionary differ in it.
        """
        alone = self.num_processes == 1
        yield inputs if alone else share_of(inputs, self.num_processes, self.process_index, apply_padding)

    @overload
    def on_main_process(self, function: Function) -> Function: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Function], Function]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorate a function to run on the first process only; it returns None on the others.

        Args:
            function: the function; leave it out to decorate with brackets.
        """
        return _keep(function, self.is_main_process)

    @overload
    def on_local_main_process(self, function: Function) -> Function: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[Function], Function]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorate a function to run on the first process of each machine; it returns None on the others.

        Args:
            function: the function; leave it out to decorate with brackets.
        """
        return _keep(function, self.is_local_main_process)

    @overload
    def on_last_process(self, function: Function) -> Function: ...
    @overload
    def on_last_process(self, function: None = None) -> Callable[[Function], Function]: ...
    def on_last_process(self, function: Any = None) -> Any:
        """Decorate a function to run on the last process only; it returns None on the others.

        Args:
            function: the function; leave it out to decorate with brackets.
        """
        return _keep(function, self.is_last_process)

    @overload
    def on_process(self, function: Function, process_index: int | None = None) -> Function: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Function], Function]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on one process only; it returns None on the others.

        Args:
            function: the function; leave it out to decorate with brackets.
            process_index: index of the process among all; a single process runs every function.

        Raises:
            ConfigurationError: no index is given.
        """
        index = _given("process_index", process_index)
        if function is None:
            return functools.partial(self.on_process, process_index=index)
        if index >= self.num_processes > 1 and self.is_main_process:
            text = "%s is meant for process %d, but there are only %d: it will never run."
            _logger.warning(text, getattr(function, "__name__", function), index, self.num_processes)
        return _keep(function, self.process_index == index or self.num_processes == 1)

    @overload
    def on_local_process(self, function: Function, local_process_index: int | None = None) -> Function: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Function], Function]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on one process of each machine only; it returns None on the others.

        Args:
            function: the function; leave it out to decorate with brackets.
            local_process_index: index of the process on its machine; a single process runs every function.

        Raises:
            ConfigurationError: no index is given.
        """
        index = _given("local_process_index", local_process_index)
        return _keep(function, self.local_process_index == index or self.num_processes == 1)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process run the block before all others, for work whose result the others find done.

        Called on every rank. When the block raises on the first process, the others go on.
        """
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each machine run the block before the others of that machine.

        Called on every rank. When the block raises on such a process, the others go on.
        """
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, leads: bool) -> Iterator[None]:
        if not leads:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if leads:
                self.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine.

        Args:
            *args: what is printed.
            **kwargs: arguments of the built-in `print`.
        """
        if self.is_local_main_process:
            print(*args, **kwargs)


def _keep(function: Callable[..., Any] | None, runs_here: bool) -> Callable[..., Any]:
    """Return a function that does nothing unless it runs on this process; a decorator without a function."""
    if function is None:
        return functools.partial(_keep, runs_here=runs_here)
    if not callable(function):
        raise wrong_value("function", function, "it cannot be called", "decorate a function", TypeError)
    if runs_here:
        return function

    @functools.wraps(function)
    def skipped(*args: Any, **kwargs: Any) -> None:
        return do_nothing(*args, **kwargs)

    return skipped


def _given(name: str, index: int | None) -> int:
    if index is None:
        raise ConfigurationError(f"{name} is missing: say which process runs the function, as in {name}=0.")
    if index < 0:
        raise wrong_value(name, index, "processes are counted from 0", "give a number that is not negative")
    return index


def plan_share(length: int, size: int, rank: int, apply_padding: bool) -> tuple[int, int, int]:
    """Return the start and end of the elements that a process takes, and how often it repeats its last one.

    The first processes take one more if need be.
    """
    per_process, extra = divmod(length, size)
    start = rank * per_process + min(rank, extra)
    end = start + per_process + (rank < extra)
    longest = per_process + (extra > 0)
    return start, end, longest - (end - start) if apply_padding else 0


def share_of(inputs: Any, size: int, rank: int, apply_padding: bool = False) -> Any:
    """Return one process's share of some inputs; see `split_between_processes`.

    A share without elements is filled with the last element of all.
    """
    if isinstance(inputs, Mapping):
        return _share_mapping(inputs, size, rank, apply_padding)
    length = _length(inputs)
    start, end, padding = plan_share(length, size, rank, apply_padding)
    last = end - 1 if end > start else length - 1
    if type(inputs).__module__.partition(".")[0] == "datasets" and hasattr(inputs, "select"):
        return inputs.select([*range(start, end), *[last] * padding] if padding else range(start, end))
    share = inputs[start:end]
    if padding == 0:
        return share
    filler = inputs[last : last + 1]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([share, *[filler] * padding])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([share, *[filler] * padding])
    if isinstance(inputs, (tuple, str)):
        return share + filler * padding
    return [*share, *list(filler) * padding]


def _share_mapping(inputs: Mapping[Any, Any], size: int, rank: int, apply_padding: bool) -> Any:
    lengths = {name: _mapping_length(value) for name, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        reason = "the entries of a dictionary that is split must be of one length"
        raise wrong_value("inputs", lengths, reason, "make them equally long, or split them one by one")
    shares = {name: share_of(value, size, rank, apply_padding) for name, value in inputs.items()}
    if type(inputs) is dict or not isinstance(inputs, MutableMapping):
        return shares
    result = copy.copy(inputs)  # a subclass with what it carries besides its entries
    result.update(shares)
    return result


def _mapping_length(value: Any) -> int:
    if not isinstance(value, Mapping):
        return _length(value)
    return next((_mapping_length(entry) for entry in value.values()), 0)


def _length(inputs: Any) -> int:
    try:
        return len(inputs)
    except TypeError:
        raise ConfigurationError(
            f"A {type(inputs).__name__} cannot be split between processes: it has no length. Pass a list, "
            "tuple, dictionary, tensor, array or dataset; turn a generator into a list first."
        ) from None
