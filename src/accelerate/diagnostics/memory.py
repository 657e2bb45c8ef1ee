"""Batch sizes that fit in memory, peak memory and allocation snapshots.

`find_executable_batch_size` is public, and `Accelerator.peak_memory` and the run monitor use the rest. The
ranks report over the store how an attempt ended, since a rank that ran out of memory can call no collective.
If others wait in a collective for it, the search ends with one error on all ranks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import psutil
import torch
import torch.distributed as dist

from accelerate import torch_private
from accelerate.base import StateError, environ, wrong_value
from accelerate.devices import DeviceBackend, clear_device_cache
from accelerate.logging import get_logger
from accelerate.ops import current_transport
from accelerate.state import PartialState, StoreChannel, process_group, record_event

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

STUCK_TIMEOUT = 30.0
"""Seconds after which a rank that ran out of memory assumes that the others wait in a collective."""

SNAPSHOT = "memory_{rank}.pickle"
MAX_EVENTS = 100_000  # allocations and frees of a snapshot; older ones are dropped
MIB = 2**20
# Only Linux can reset the peak memory of a process, by a write to this file.
CLEAR_REFS, NEW_PEAK, STATUS, PEAK = Path("/proc/self/clear_refs"), "5", Path("/proc/self/status"), "VmHWM:"
_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cudnn_status_not_supported",
    "cublas_status_alloc_failed",
    "allocation failed",
    "resource_exhausted",
)
"""Parts of messages of allocators that run out of memory, in lower case."""


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Returns whether an exception was raised because memory ran out.

    Args:
        exception: Exception of a training step.

    Returns:
        True for `MemoryError`, `torch.OutOfMemoryError`, and a `RuntimeError` with a message of an allocator.
    """
    if isinstance(exception, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(message in text for message in _OUT_OF_MEMORY_MESSAGES)


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[P, R]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Calls a function with decreasing batch sizes until it does not run out of memory.

    All ranks use the same size. If a rank runs out of memory, and all ranks have called the same
    collectives, all retry with the smaller size. If the others wait in a collective for a rank that ran out
    of memory, all ranks raise an error that names the size. The returned function is called on all ranks,
    after the `Accelerator` or `PartialState` is created. The wait for the other ranks ends with an error
    after the `timeout` of the process group.

    Args:
        function: Function whose first argument is the batch size, which callers leave out. Without it, a
            decorator is returned.
        starting_batch_size: First size to try. Later calls start with the size that was found.
        reduce_batch_size_fn: Function that returns the next size. It may take the last size as its argument.
            Default: half of the last size.

    Returns:
        The function without its first argument, or a decorator.

    Raises:
        TypeError: `starting_batch_size` is not a whole number, or the caller passes a batch size.
        ConfigurationError: At the call, if `reduce_batch_size_fn` does not return a smaller size.
        StateError: At the call, if the size reaches zero, or if another rank fails or waits in a collective
            for one that ran out of memory. It is a `RuntimeError`.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    start: object = starting_batch_size
    if isinstance(start, bool) or not isinstance(start, Integral):
        reason, fix = "it is not a whole number", "Pass an integer of at least 1"
        raise wrong_value("starting_batch_size", start, reason, fix, TypeError)
    reduce_size: Callable[..., int] = reduce_batch_size_fn or (lambda size: size // 2)
    takes_size = bool(inspect.signature(reduce_size).parameters)
    fitting = starting_batch_size

    @functools.wraps(function)
    def with_fitting_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal fitting
        _reject_batch_size(function, args, kwargs)
        size, attempts, reason = fitting, join_attempts(), ""
        while size > 0:
            clear_device_cache(garbage_collection=True)
            fits, result, reason = _attempt(attempts, functools.partial(function, size, *args, **kwargs))
            if type(attempts) is Attempts:
                attempts = join_attempts()
            if not attempts.agree(not fits, size):
                fitting = size
                return result
            result, smaller = None, reduce_size(size) if takes_size else reduce_size()
            if smaller >= size:
                reason = f"this is not smaller than {size}, with which memory ran out"
                fix = "Return a smaller batch size at each call"
                raise wrong_value("reduce_batch_size_fn", smaller, reason, fix)
            record_event("out_of_memory", f"the batch size is now {smaller}, and was {size}")
            size = smaller
        raise StateError(
            f"No executable batch size found, reached zero. `{_name(function)}` ran out of memory with every "
            f"size from {fitting} downwards.{reason and ' The last time: ' + reason}"
        )

    return with_fitting_batch


def _attempt(attempts: Attempts, call: Callable[[], Any]) -> tuple[bool, Any, str]:
    """Returns whether a call fitted in memory, its result, and otherwise the text of its exception.

    The exception is not returned, because its traceback would keep the tensors of the failed attempt alive.
    """
    attempts.begin()
    try:
        return True, call(), ""
    except Exception as error:
        if not should_reduce_batch_size(error) and not attempts.was_interrupted():
            attempts.fail(error)
            raise
        return False, None, str(error)
    except BaseException as error:
        attempts.fail(error)
        raise


def _reject_batch_size(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind_partial(0, *args, **kwargs)
    except TypeError as error:
        name = _name(function)
        rest = ", ".join([*map(_short, args[1:]), *(f"{key}=..." for key in kwargs)])
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called, or the arguments do not "
            f"fit ({error}). The decorator puts the batch size in: call it as `{name}({rest})`."
        ) from None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 20 else type(value).__name__.lower()


class Attempts:
    """Attempts of one process, or of several processes without a store, which agree over the transport.

    Each attempt is one `begin`, then one of `agree` and `fail`. Without a store, no rank may wait in a
    collective for a rank that runs out of memory.
    """

    def begin(self) -> None:
        """Starts an attempt.

        Called on all ranks.
        """

    def was_interrupted(self) -> bool:
        """Returns whether the error of this rank is caused by another rank that ran out of memory."""
        return False

    def fail(self, error: BaseException) -> None:
        """Reports an error of this rank that is not caused by memory.

        Called instead of `agree`.
        """

    def agree(self, ran_out: bool, batch_size: int) -> bool:
        """Returns whether any rank ran out of memory, after all ranks have ended the attempt.

        Called on all ranks.
        """
        return any(current_transport().gather_object(ran_out)) if PartialState._shared_state else ran_out


class StoreAttempts(Attempts):
    """Attempts of several processes, which agree over the store of `torch.distributed`.

    The rank that ends its attempt last reads the reports of all ranks, and posts a summary for the others.
    """

    def __init__(self, state: PartialState, connection: Any) -> None:
        self._state, self._connection = state, connection
        store: Any = torch_private.default_store()
        self._timeout = store.timeout.total_seconds()
        self._search = store.add(f"accelerate/attempts/{state.process_index}", 1)
        self._attempt = 0
        self._channel = self._open_channel()

    def begin(self) -> None:
        self._attempt += 1
        self._channel = self._open_channel()

    def was_interrupted(self) -> bool:
        try:
            return self._channel.read("ran out") is not None
        except dist.DistError:  # the process that hosts the store has ended, so no rank waits for an answer
            return False

    def fail(self, error: BaseException) -> None:
        with suppress(dist.DistError):  # the same; the caller raises its error
            self._report("failed", f"{type(error).__name__}: {error}")

    def agree(self, ran_out: bool, batch_size: int) -> bool:
        timeout = STUCK_TIMEOUT if ran_out else self._timeout
        try:
            summary = self._await_summary(ran_out, timeout)
        except dist.DistError as error:
            advice = f" Start it again with starting_batch_size={batch_size // 2}." if ran_out else ""
            raise StateError(
                "The process that hosts the store of the run, rank 0 or the launcher, has ended, so the "
                f"search for a batch size cannot continue in this run.{advice}"
            ) from error
        if summary["failed"]:
            failed = "\n".join(f"Rank {rank}: {reason}" for rank, reason in summary["failed"])
            raise StateError(f"The attempt failed on another rank. {failed}")
        out, missing, issued = summary["ran out"], summary["missing"], summary["issued"]
        if missing and not out:
            raise StateError(
                f"Ranks {missing} did not end their attempt within {timeout:.0f} s, so no size can be agreed "
                "on. Give InitProcessGroupKwargs a longer timeout."
            )
        if out and (missing or len(issued) > 1 or issued == [None]):  # the next collectives would not match
            raise StateError(
                f"Ranks {out} ran out of memory with a batch size of {batch_size}, and the other ranks wait "
                "for them in a collective, so the search cannot continue in this run. Start it again with "
                f"starting_batch_size={batch_size // 2}."
            )
        return bool(out)

    def _await_summary(self, ran_out: bool, timeout: float) -> Any:
        self._report(
            "ran out" if ran_out else "done",
            torch_private.num_collectives(dist.group.WORLD) if dist.is_initialized() else None,
        )
        return self._channel.wait(["summary"], timeout)["summary"] or self._summarize()

    def _open_channel(self) -> StoreChannel:
        scope = f"accelerate/attempts/{self._search}/{self._attempt}"
        return StoreChannel(self._connection, scope, environ.current())

    def _report(self, how: str, detail: str | int | None) -> None:
        """Posts how this attempt ended on this rank, as "done", "ran out" or "failed"."""
        if how == "ran out":
            self._channel.post(how, True)
        self._channel.append("ended", [self._state.process_index, how, detail])
        if self._channel.count("ends", 1) == self._state.num_processes:
            self._summarize()

    def _summarize(self) -> Any:
        """Posts the summary of the reports of all ranks, unless there is one, and returns it."""
        reports = self._channel.read_list("ended")
        ended = {rank for rank, *_ in reports}
        summary = {
            "failed": [(rank, detail) for rank, how, detail in reports if how == "failed"],
            "ran out": sorted(rank for rank, how, _ in reports if how == "ran out"),
            "missing": [rank for rank in range(self._state.num_processes) if rank not in ended],
            "issued": list({issued for _, how, issued in reports if how != "failed"}),
        }
        return self._channel.decide("summary", summary)


def join_attempts() -> Attempts:
    """Returns the attempts of this process, over the store if there is a state with several processes."""
    has_others = bool(PartialState._shared_state) and PartialState().num_processes > 1
    connection = process_group.connect_store() if has_others and process_group.is_open() else None
    return Attempts() if connection is None else StoreAttempts(PartialState(), connection)


class PeakMemory:
    """Peak memory of a block, which is set at the end of the block."""

    def __init__(self) -> None:
        self.peak = 0  # bytes on this rank, of the device, or of the process on the CPU
        self.peaks: list[int] = []  # bytes on each rank, by rank

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {peak / MIB:,.0f} MiB" for rank, peak in enumerate(self.peaks))


class MemoryMeter:
    """Meter of the peak memory that is allocated on the current device of a backend, in bytes.

    For backends whose torch module does not report it, it measures the memory of this process, including the
    memory that was allocated before `start`.
    """

    def __init__(self, backend: DeviceBackend) -> None:
        module: Any = None if backend.is_host else backend.torch_module()
        self._module = module if hasattr(module, "max_memory_allocated") else None

    def start(self) -> None:
        """Resets the peak, if the device or the operating system supports it."""
        if self._module is not None:
            self._module.reset_peak_memory_stats()
        elif CLEAR_REFS.exists():
            CLEAR_REFS.write_text(NEW_PEAK, encoding="ascii")

    def peak(self) -> int:
        if self._module is not None:
            return int(self._module.max_memory_allocated())
        for line in STATUS.read_text(encoding="ascii").splitlines() if STATUS.exists() else ():
            if line.startswith(PEAK):
                return int(line.split()[1]) * 1024
        now = psutil.Process().memory_info()
        if sys.platform == "win32":
            peak = int(now.peak_wset)
        else:
            import resource  # not available on Windows

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak = peak if sys.platform == "darwin" else peak * 1024  # in bytes only on macOS
        return max(peak, int(now.rss))


@contextmanager
def snapshot_on_exhaustion(backend: DeviceBackend, folder: str | Path, rank: int) -> Iterator[None]:
    """Records allocations in the block, and writes them to `memory_RANK.pickle` if memory runs out.

    https://pytorch.org/memory_viz shows the file. Devices whose torch module does not record allocations get
    one warning and no file.
    """
    memory: Any = None if backend.is_host else getattr(backend.torch_module(), "memory", None)
    record = torch_private.memory_recorder(memory)
    if record is None:
        logger.warning_once(f"{backend.label} keeps no record of allocations: no snapshot will be written.")
        yield
        return
    record(max_entries=MAX_EVENTS, stacks="python")  # C++ frames take seconds, and processes that stay
    try:
        yield
    except Exception as error:
        if should_reduce_batch_size(error):
            path = Path(folder) / SNAPSHOT.format(rank=rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch_private.memory_dump(memory)(str(path))
            logger.warning(
                f"Memory ran out. The allocations are in {path}; look at them at https://pytorch.org/memory_viz",
                main_process_only=False,
            )
        raise
    finally:
        record(enabled=None)
