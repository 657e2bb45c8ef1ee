"""Memory of the device or the process: smaller batches when it runs out, peaks, records of allocations.

When one of several processes runs out of memory, the others wait for it in a collective. So the ranks agree
over the store on how an attempt ended. When some do not report because they still wait, every process aborts
the process group, which wakes them, and a new group is opened on the same store.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import psutil
import torch
import torch.distributed as dist

from accelerate import torch_private
from accelerate.base import AccelerateError, StateError, environ, wrong_value
from accelerate.devices import DeviceBackend, clear_device_cache
from accelerate.logging import get_logger
from accelerate.ops import current_transport
from accelerate.state import PartialState, StoreChannel, note_event, process_group, services

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

SECONDS_OF_GRACE = 5.0
"""How long a process that ran out of memory waits for the others before it takes them for stuck."""
SECONDS_TO_LEAVE = 30.0
_PAUSE = 4.0
"""Seconds between two looks whether a rank closes the process group: this goes on while all ranks train."""
_FIRST_LOOK = 0.05
_GROWTH = 2.0

SNAPSHOT = "memory_{rank}.pickle"
MOST_EVENTS = 100_000  # allocations and frees that a record keeps; older ones are dropped
MIB = 2**20
# Linux alone can begin a new peak of a process: writing this to its file forgets the old one.
CLEAR_REFS, NEW_PEAK, STATUS, PEAK = Path("/proc/self/clear_refs"), "5", Path("/proc/self/status"), "VmHWM:"
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cudnn_status_not_supported",
    "cublas_status_alloc_failed",
    "allocation failed",
    "resource_exhausted",
)
"""What allocators say when there is no room, in small letters."""


class NoExecutableBatchSizeError(AccelerateError, RuntimeError):
    """Even the smallest batch did not fit in memory."""


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Tell whether an exception means that memory ran out.

    Args:
        exception: What a training step raised.
    """
    if isinstance(exception, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(sign in text for sign in _SIGNS)


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
    """Call a function with smaller and smaller batch sizes until it does not run out of memory.

    Several processes agree: when one runs out, all try again with the smaller size. For that the function is
    called on all ranks, after the `Accelerator` (or `PartialState`) was made, and what talks to other
    processes (prepared models, device meshes) is made inside the function: processes that wait in a
    collective for one that ran out are woken by closing the process group, and a new one is opened. What they
    did in the meantime is lost. The wait for the others ends with an error after the `timeout` of the process
    group.

    Args:
        function: Takes the batch size as its first argument, which its callers leave out. Without it, a
            decorator is returned.
        starting_batch_size: The first size to try. Later calls start with the one that was found.
        reduce_batch_size_fn: Returns the next size; it may take the last one as its argument. By default half
            of it.

    Returns:
        The function without its first argument, or a decorator.

    Raises:
        TypeError: At the call, when the caller passes a batch size.
        NoExecutableBatchSizeError: At the call, when the size reaches zero (a `RuntimeError`).
        ConfigurationError: At the call, when `reduce_batch_size_fn` gives no smaller size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    reduce_size: Callable[..., int] = reduce_batch_size_fn or (lambda size: size // 2)
    takes_size = bool(inspect.signature(reduce_size).parameters)
    fitting = starting_batch_size

    @functools.wraps(function)
    def with_fitting_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal fitting
        _refuse_batch_size(function, args, kwargs)
        size, attempts, reason = fitting, join_attempts(), ""
        while size > 0:
            clear_device_cache(garbage_collection=True)
            fits, result, reason = _attempt(attempts, functools.partial(function, size, *args, **kwargs))
            if type(attempts) is Attempts:
                attempts = join_attempts()
            if not attempts.agree(not fits):
                fitting = size
                return result
            result, smaller = None, reduce_size(size) if takes_size else reduce_size()
            if smaller >= size:
                reason = f"this is not smaller than {size}, with which memory ran out"
                fix = "Return a smaller batch size at each call"
                raise wrong_value("reduce_batch_size_fn", smaller, reason, fix)
            note_event("out_of_memory", f"the batch size is now {smaller}, and was {size}")
            size = smaller
        raise NoExecutableBatchSizeError(
            f"No executable batch size found, reached zero. `{_name(function)}` ran out of memory with every "
            f"size from {fitting} downwards.{reason and ' The last time: ' + reason}"
        )

    return with_fitting_batch


def _attempt(attempts: Attempts, call: Callable[[], Any]) -> tuple[bool, Any, str]:
    """Call, and return whether it fitted, its result, and what was said when it did not fit.

    The exception does not leave here: its traceback would keep the tensors of the failed attempt alive.
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


def _refuse_batch_size(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 20 else type(value).__name__.lower()


class Attempts:
    """Agreement over the transport, where there is one process or no store.

    Each attempt is one `begin`, then one of `agree` and `fail`. Without a store no rank may be stuck in a
    collective meanwhile.
    """

    def begin(self) -> None:
        """An attempt starts. Called on all ranks."""

    def was_interrupted(self) -> bool:
        """Whether an error of this process came from another one that ran out of memory meanwhile."""
        return False

    def fail(self, error: BaseException) -> None:
        """Report that this process ends with an error of its own."""

    def agree(self, ran_out: bool) -> bool:
        """Wait for all processes, and return whether any of them ran out of memory. Called on all ranks."""
        return any(current_transport().gather_object(ran_out)) if PartialState._shared_state else ran_out


class StoreAttempts(Attempts):
    """Several processes of `torch.distributed`, which agree through its store.

    The rank that ends its attempt last posts a summary of all: no other rank reads all reports.
    """

    def __init__(self, state: PartialState, connection: Any) -> None:
        self._state, self._connection = state, connection
        self._store: Any = torch_private.default_store()
        self._search = self._store.add(f"accelerate/attempts/{state.process_index}", 1)
        self._attempt = 0
        self._channel = self._open_channel(connection)
        self._watcher: threading.Thread | None = None
        self._stopped = self._left = threading.Event()

    def begin(self) -> None:
        self._attempt += 1
        self._channel = self._open_channel(self._connection)
        self._start_watcher()

    def was_interrupted(self) -> bool:
        try:
            return self._channel.read("ran out") is not None
        except dist.DistError:  # the store went with the process that kept it, so no rank waits for an answer
            return False

    def fail(self, error: BaseException) -> None:
        try:
            self._report("failed", f"{type(error).__name__}: {error}")
        except dist.DistError:  # as above: the caller raises the error itself
            return
        finally:
            self._stop_watcher()

    def agree(self, ran_out: bool) -> bool:
        try:
            return self._agree(ran_out)
        finally:
            self._stop_watcher()

    def _agree(self, ran_out: bool) -> bool:
        self._report("ran out" if ran_out else "done", _collectives_issued())
        if ran_out and (_is_closing(self._channel) or not self._all_end_soon()):
            self._channel.decide("fate", "close")
            torch_private.drop_group_references()
        limit = self._store.timeout.total_seconds()
        summary = self._channel.wait(["summary"], limit)["summary"]
        if summary is None:
            came = {rank for rank, *_ in self._channel.read_list("ended")}
            missing = [rank for rank in range(self._state.num_processes) if rank not in came]
            raise StateError(
                f"Processes {missing} did not end their attempt within {limit:.0f} s, so no size "
                "can be agreed on. Give InitProcessGroupKwargs a longer timeout, and make what holds "
                "the process group (device meshes, subgroups) inside the function."
            )
        if summary["failed"]:
            failed = "\n".join(f"Process {rank}: {why}" for rank, why in summary["failed"])
            raise StateError(f"The attempt failed on another process. {failed}")
        if summary["fits"]:
            return False
        # Where all ranks have issued the same number of collectives, the next ones meet.
        issued = _collectives_issued()
        in_step = issued is not None and summary["issued"] == [issued]
        if self._channel.decide("fate", "keep" if in_step else "close") == "close":
            self._reopen_group()
        return True

    def _all_end_soon(self) -> bool:
        """Whether the other ranks end their attempts too, and do not wait for this one in a collective."""
        end, pause = time.monotonic() + SECONDS_OF_GRACE, _FIRST_LOOK
        while self._channel.read("summary") is None:
            if time.monotonic() >= end:
                return False
            time.sleep(min(pause, max(end - time.monotonic(), 0.0)))
            pause *= _GROWTH
        return True

    def _reopen_group(self) -> None:
        """Leave the old group on all ranks and meet in a new one."""
        if self._watcher is None:  # the state is new
            self._start_watcher()
        if not self._left.wait(SECONDS_TO_LEAVE):
            raise StateError(
                "A process ran out of memory, and the process group cannot be closed: collectives that were "
                "started wait for each other. Start the run again with a smaller batch size."
            )
        device = self._state.device
        dist.init_process_group(
            self._state.backend,
            store=dist.PrefixStore(f"{self._scope()}/group", self._store),  # type: ignore[attr-defined]
            rank=self._state.process_index,
            world_size=self._state.num_processes,
            timeout=self._store.timeout,
            device_id=device if self._state.device_backend.binds_group else None,
        )
        services.own_group()

    def _scope(self) -> str:
        return f"accelerate/attempts/{self._search}/{self._attempt}"

    def _open_channel(self, store: Any) -> StoreChannel:
        return StoreChannel(store, self._scope(), environ.current())

    def _report(self, how: str, detail: str | int | None) -> None:
        """Report how this attempt ended on this rank: "done", "ran out" or "failed"."""
        if how == "ran out":
            self._channel.post(how, True)
        self._channel.append("ended", [self._state.process_index, how, detail])
        if self._channel.count("ends", 1) == self._state.num_processes:
            self._channel.post("summary", _summarize(self._channel.read_list("ended")))

    def _start_watcher(self) -> None:
        """Start a thread that aborts the process group when a rank decides so: this one may hang in it."""
        self._stopped, self._left = threading.Event(), threading.Event()
        # On the connection of the group: this rank waits on its own one.
        arguments = (self._open_channel(self._store), self._stopped, self._left)
        self._watcher = threading.Thread(
            target=_watch, args=arguments, name="accelerate-attempt", daemon=True
        )
        self._watcher.start()

    def _stop_watcher(self) -> None:
        if self._watcher is not None:
            self._stopped.set()
            self._watcher.join(SECONDS_TO_LEAVE)
            self._watcher = None


def _watch(channel: StoreChannel, stopped: threading.Event, left: threading.Event) -> None:
    try:
        while not _is_closing(channel):
            if stopped.wait(_PAUSE):
                return
    except dist.DistError:  # the store is gone; the main thread raises the same error
        return
    if dist.is_initialized():
        torch_private.abort_process_group()
    left.set()


def _summarize(reports: list[Any]) -> dict[str, Any]:
    """Write what all ranks need to know of the ends of an attempt."""
    return {
        "failed": [(rank, why) for rank, how, why in reports if how == "failed"],
        "fits": all(how == "done" for _, how, _ in reports),
        "issued": list({issued for _, _, issued in reports}),
    }


def join_attempts() -> Attempts:
    """Return how this process agrees with the others: alone when there is no state or no other process."""
    has_others = bool(PartialState._shared_state) and PartialState().num_processes > 1
    connection = process_group.connect_store() if has_others and process_group.is_open() else None
    return Attempts() if connection is None else StoreAttempts(PartialState(), connection)


def _is_closing(channel: StoreChannel) -> bool:
    return bool(channel.read("fate") == "close")


def _collectives_issued() -> int | None:
    """How many collectives this process has issued; None for a closed group, or where it is unknown."""
    return torch_private.num_collectives(dist.group.WORLD) if dist.is_initialized() else None


class PeakMemory:
    """What a block used at most; filled in at its end."""

    def __init__(self) -> None:
        self.peak = 0  # bytes of this rank: of the device, or on the CPU of the process
        self.peaks: list[int] = []  # bytes of each rank, in order

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {peak / MIB:,.0f} MiB" for rank, peak in enumerate(self.peaks))


class MemoryMeter:
    """Measures the memory that the current device of a kind of hardware has given out, in bytes.

    For hardware whose module does not report it, the memory of this process, with what it had at the start.
    """

    def __init__(self, backend: DeviceBackend) -> None:
        module: Any = None if backend.is_host else backend.torch_module()
        self._module = module if hasattr(module, "max_memory_allocated") else None

    def start(self) -> None:
        """Begin a new peak, where the system can."""
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
            most = int(now.peak_wset)
        else:
            import resource  # not on Windows

            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            most = most if sys.platform == "darwin" else most * 1024  # it is in bytes on macOS alone
        return max(most, int(now.rss))


@contextmanager
def snapshot_on_exhaustion(backend: DeviceBackend, folder: str | Path, rank: int) -> Iterator[None]:
    """Record allocations in the block; when memory runs out, write them to `memory_RANK.pickle`.

    The file is opened at https://pytorch.org/memory_viz. Devices whose module keeps no record have none: a
    warning says so once.
    """
    memory: Any = None if backend.is_host else getattr(backend.torch_module(), "memory", None)
    record = torch_private.memory_recorder(memory)
    if record is None:
        logger.warning_once(f"{backend.label} keeps no record of allocations: no snapshot will be written.")
        yield
        return
    record(max_entries=MOST_EVENTS)
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
