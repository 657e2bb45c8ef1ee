"""Mixin with the methods that depend on the rank, for the states and `Accelerator`.

They run functions on some ranks, print, wait, and split inputs between ranks.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from accelerate.base import ConfigurationError, wrong_value
from accelerate.state import process_group
from accelerate.state.shared import Leader, do_nothing, services

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_logger = logging.getLogger(__name__)


class ProcessControl:
    """Mixin with the methods that depend on the rank of this process.

    It has no state. A subclass has `num_processes`, `process_index`, `local_process_index` and `device`.
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
        """True on rank 0, with replica groups on that of the first group that takes part in a step."""
        return self.process_index == 0 and _is_of_leader()

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank 0 of each node, with replica groups only in the one of the main process."""
        return self.local_process_index == 0 and _is_of_leader()

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Waits until all ranks have called this.

        Called on all ranks. A single process does not wait.

        Raises:
            StateError: The process group is closed.
        """
        if self.num_processes > 1 and services.barrier is not None and process_group.is_open():
            services.barrier()
        elif self.num_processes > 1:
            process_group.wait(self.device)
        if (leader := services.find(Leader)) is not None:
            leader.wait_for_others()

    @contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Iterator[T]:
        """Splits inputs that all ranks have between the ranks, without communication.

        Args:
            inputs: A list, tuple, tensor, array or dataset, which is split along its first dimension, or a
                dictionary of these, all of one length. If the length is not a multiple of the world size, the
                first ranks get one element more.
            apply_padding: Whether to repeat the last element of shorter shards, so that they can be gathered.
                The default is False.

        Yields:
            The shard of this rank, in a container of the same type, or for a dataset of torch in a `Subset`.
            A single process gets the inputs themselves.

        Raises:
            ConfigurationError: The inputs have no length or cannot be sliced, or those of a dictionary have
                different lengths.
        """
        size, rank = self.num_processes, self.process_index
        yield inputs if size == 1 else split_for_rank(inputs, size, rank, apply_padding)

    @overload
    def on_main_process(self, function: Function) -> Function: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Function], Function]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorates a function to run on rank 0 only, and to return None on the other ranks.

        Args:
            function: The function. Without it, a decorator is returned.
        """
        return _run_if(function, self.is_main_process)

    @overload
    def on_local_main_process(self, function: Function) -> Function: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[Function], Function]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorates a function to run on local rank 0 of each node only, and to return None on the others.

        Args:
            function: The function. Without it, a decorator is returned.
        """
        return _run_if(function, self.is_local_main_process)

    @overload
    def on_last_process(self, function: Function) -> Function: ...
    @overload
    def on_last_process(self, function: None = None) -> Callable[[Function], Function]: ...
    def on_last_process(self, function: Any = None) -> Any:
        """Decorates a function to run on the last rank only, and to return None on the other ranks.

        Args:
            function: The function. Without it, a decorator is returned.
        """
        return _run_if(function, self.is_last_process)

    @overload
    def on_process(self, function: Function, process_index: int | None = None) -> Function: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Function], Function]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorates a function to run on one rank only, and to return None on the other ranks.

        Args:
            function: The function. Without it, a decorator is returned.
            process_index: The rank. A single process runs the function for any rank.

        Raises:
            ConfigurationError: `process_index` is missing or negative.
        """
        index = _check_index("process_index", process_index)
        if function is None:
            return functools.partial(self.on_process, process_index=index)
        if index >= self.num_processes > 1 and self.is_main_process:
            text = "%s is to run on process %d, but there are only %d: it will never run."
            _logger.warning(text, getattr(function, "__name__", function), index, self.num_processes)
        return _run_if(function, self.process_index == index or self.num_processes == 1)

    @overload
    def on_local_process(self, function: Function, local_process_index: int | None = None) -> Function: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Function], Function]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorates a function to run on one local rank of each node only, and to return None on the others.

        Args:
            function: The function. Without it, a decorator is returned.
            local_process_index: The local rank. A single process runs the function for any local rank.

        Raises:
            ConfigurationError: `local_process_index` is missing or negative.
        """
        index = _check_index("local_process_index", local_process_index)
        return _run_if(function, self.local_process_index == index or self.num_processes == 1)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Runs the block on rank 0 before the other ranks, for example to fill a cache that these read.

        Called on all ranks. If the block raises an error on rank 0, the others continue.

        Returns:
            A context manager.
        """
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Runs the block on local rank 0 of each node before the other ranks.

        Called on all ranks. If the block raises an error on a local rank 0, the others continue.

        Returns:
            A context manager.
        """
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on local rank 0 of each node.

        Args:
            *args: Values to print.
            **kwargs: Arguments of the built-in `print`.
        """
        if self.is_local_main_process:
            print(*args, **kwargs)


def _run_if(function: Callable[..., Any] | None, runs_here: bool) -> Callable[..., Any]:
    """Returns the function, or one that does nothing if it does not run here, or a decorator without one."""
    if function is None:
        return functools.partial(_run_if, runs_here=runs_here)
    if not callable(function):
        raise wrong_value("function", function, "it cannot be called", "decorate a function", TypeError)
    if runs_here:
        return function

    @functools.wraps(function)
    def skipped(*args: Any, **kwargs: Any) -> None:
        return do_nothing(*args, **kwargs)

    return skipped


def _check_index(name: str, index: int | None) -> int:
    if index is None:
        raise ConfigurationError(f"{name} is missing: say which process runs the function, as in {name}=0.")
    if index < 0:
        raise wrong_value(name, index, "processes are counted from 0", "give a number that is not negative")
    return index


def plan_split(length: int, size: int, rank: int, apply_padding: bool) -> tuple[int, int, int]:
    """Returns the start and end of the shard of a rank, and the number of elements of its padding.

    If the length is not a multiple of the world size, the first ranks get one element more.
    """
    per_rank, remainder = divmod(length, size)
    start = rank * per_rank + min(rank, remainder)
    end = start + per_rank + (rank < remainder)
    longest = per_rank + (remainder > 0)
    return start, end, longest - (end - start) if apply_padding else 0


def split_for_rank(inputs: Any, size: int, rank: int, apply_padding: bool = False) -> Any:
    """Returns the shard of one rank of inputs as described in `split_between_processes`.

    An empty shard is padded with the last element of all inputs.
    """
    if isinstance(inputs, Mapping):
        return _split_mapping(inputs, size, rank, apply_padding)
    length = _length(inputs)
    start, end, padding = plan_split(length, size, rank, apply_padding)
    last = end - 1 if end > start else length - 1
    if type(inputs).__module__.partition(".")[0] == "datasets" and hasattr(inputs, "select"):
        rows: Any = range(start, end) or []  # datasets checks the start of an empty range
        return inputs.select([*rows, *[last] * padding] if padding else rows)
    if hasattr(inputs, "iloc"):  # of pandas, whose slices may select labels, and which iterates over columns
        return inputs.iloc[[*range(start, end), *[last] * padding]]
    if isinstance(inputs, Dataset):  # a slice has the columns of a sample instead of samples
        return Subset(inputs, [*range(start, end), *[last] * padding])
    try:
        shard = inputs[start:end]
    except TypeError:
        raise _not_splittable(inputs, "it has no order, or cannot be sliced") from None
    if padding == 0:
        return shard
    last_element = inputs[last : last + 1]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([shard, *[last_element] * padding])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([shard, *[last_element] * padding])
    if isinstance(inputs, (tuple, str)):
        return shard + last_element * padding
    return [*shard, *list(last_element) * padding]


def _split_mapping(inputs: Mapping[Any, Any], size: int, rank: int, apply_padding: bool) -> Any:
    lengths = {name: _mapping_length(value) for name, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        reason = "the entries of a dictionary that is split must be of one length"
        raise wrong_value("inputs", lengths, reason, "make them equally long, or split them one by one")
    shards = {name: split_for_rank(value, size, rank, apply_padding) for name, value in inputs.items()}
    if type(inputs) is dict or not isinstance(inputs, MutableMapping):
        return shards
    result = copy.copy(inputs)  # keeps attributes of a subclass
    result.update(shards)
    return result


def _mapping_length(value: object) -> int:
    if not isinstance(value, Mapping):
        return _length(value)
    return next((_mapping_length(entry) for entry in value.values()), 0)


def _length(inputs: Any) -> int:
    try:
        return len(inputs)
    except TypeError:
        raise _not_splittable(inputs, "it has no length") from None


def _not_splittable(inputs: object, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"A {type(inputs).__name__} cannot be split between processes: {reason}. Pass a list, tuple, "
        "dictionary, tensor, array or dataset; turn a generator or a set into a list first."
    )


def _is_of_leader() -> bool:
    """Returns whether the replica group of this process writes files and prints."""
    leader = services.find(Leader)
    return leader is None or leader.is_leader
