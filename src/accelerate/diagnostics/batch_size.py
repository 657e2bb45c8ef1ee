"""Retry with a smaller batch after the memory ran out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch

from accelerate.base import AccelerateError, wrong_value
from accelerate.devices import clear_device_cache
from accelerate.diagnostics.oom_retry import Attempts, join_attempts

# What allocators say when there is no room, in small letters.
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cudnn_status_not_supported",
    "cublas_status_alloc_failed",
    "allocation failed",
    "resource_exhausted",
)


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


P = ParamSpec("P")
R = TypeVar("R")


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
    found = starting_batch_size

    @functools.wraps(function)
    def with_fitting_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        _refuse_batch_size(function, args, kwargs)
        size, attempts, reason = found, join_attempts(), ""
        while size > 0:
            clear_device_cache(garbage_collection=True)
            fits, result, reason = _attempt(attempts, functools.partial(function, size, *args, **kwargs))
            if type(attempts) is Attempts:
                attempts = join_attempts()
            if not attempts.settle(not fits):
                found = size
                return result
            result, size = None, _next_size(size, reduce_size)
        raise NoExecutableBatchSizeError(
            f"No executable batch size found, reached zero. `{_name(function)}` ran out of memory with every "
            f"size from {found} downwards.{reason and ' The last time: ' + reason}"
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
