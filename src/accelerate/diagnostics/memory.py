"""Memory of the device or the process: smaller batches when it runs out, peaks, records of allocations."""

from __future__ import annotations

import functools
import inspect
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import psutil
import torch

from accelerate import torch_private
from accelerate.base import AccelerateError, wrong_value
from accelerate.devices import DeviceBackend, clear_device_cache
from accelerate.diagnostics.oom_retry import Attempts, join_attempts
from accelerate.logging import get_logger

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

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
    reduce_size = _reduction(reduce_batch_size_fn)
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
            result, size = None, _next_size(size, reduce_size)
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


def _reduction(function: Callable[..., int] | None) -> Callable[[int], int]:
    if function is None:
        return lambda size: size // 2
    if inspect.signature(function).parameters:
        return function
    return lambda size: function()


def _next_size(size: int, reduce_size: Callable[[int], int]) -> int:
    smaller = reduce_size(size)
    if smaller >= size:
        raise wrong_value(
            "reduce_batch_size_fn",
            smaller,
            f"this is not smaller than {size}, with which memory ran out",
            "Return a smaller batch size at each call",
        )
    return smaller


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


class PeakMemory:
    """What a block used at most; filled in at its end.

    Attributes:
        peak: Bytes of this rank: of the device, or on the CPU of the process.
        peaks: Bytes of each rank, in order.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.peaks: list[int] = []

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {peak / MIB:,.0f} MiB" for rank, peak in enumerate(self.peaks))


class HostMeter:
    """Measures the memory of this process; what was in use at the start counts."""

    def start(self) -> None:
        """Begin a new peak, where the system can."""
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text(NEW_PEAK)

    def peak(self) -> int:
        """Return the peak, in bytes."""
        for line in STATUS.read_text().splitlines() if STATUS.exists() else ():
            if line.startswith(PEAK):
                return int(line.split()[1]) * 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
        return max(most if psutil.MACOS else most * 1024, psutil.Process().memory_info().rss)


class DeviceMeter:
    """Measures the memory that a torch module gives out on the current device."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def start(self) -> None:
        """Begin a new peak."""
        self.module.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the peak, in bytes."""
        return int(self.module.max_memory_allocated())


def meter_of(backend: DeviceBackend) -> HostMeter | DeviceMeter:
    """Return what measures the memory of a kind of hardware: of the process where its module cannot tell.

    Args:
        backend: The hardware of the run.
    """
    if backend.is_host or not hasattr(backend.torch_module(), "max_memory_allocated"):
        return HostMeter()
    return DeviceMeter(backend.torch_module())


@contextmanager
def snapshot_on_exhaustion(backend: DeviceBackend, folder: str | Path, rank: int) -> Iterator[None]:
    """Record allocations in the block; when memory runs out, write them to `memory_RANK.pickle`.

    The file is opened at https://pytorch.org/memory_viz. Devices whose module keeps no record have none: that
    is said once.

    Args:
        backend: The hardware of the run.
        folder: Where the file goes; made when it is written.
        rank: Of this process.
    """
    recorder: Any = None if backend.is_host else getattr(backend.torch_module(), "memory", None)
    if not torch_private.can_record_memory(recorder):
        logger.warning_once(f"{backend.label} keeps no record of allocations: no snapshot will be written.")
        yield
        return
    torch_private.record_memory(recorder, max_entries=MOST_EVENTS)
    try:
        yield
    except Exception as error:
        if should_reduce_batch_size(error):
            _write(recorder, Path(folder), rank)
        raise
    finally:
        torch_private.record_memory(recorder, enabled=None)


def _write(recorder: Any, folder: Path, rank: int) -> None:
    path = folder / SNAPSHOT.format(rank=rank)
    folder.mkdir(parents=True, exist_ok=True)
    torch_private.dump_memory(recorder, str(path))
    logger.warning(
        f"Memory ran out. The allocations are in {path}; look at them at https://pytorch.org/memory_viz",
        main_process_only=False,
    )
