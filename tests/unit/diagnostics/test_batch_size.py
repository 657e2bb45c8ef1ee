"""The search for a batch size on one process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from accelerate.diagnostics import find_executable_batch_size, should_reduce_batch_size
from accelerate.monitoring import Event
from accelerate.state import run_records


class Recorder:
    """A training function that needs memory for more than `fits` samples."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.sizes: list[int] = []

    def __call__(self, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(batch_size)
        if batch_size > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return batch_size, args, kwargs


@pytest.mark.parametrize(
    ("exception", "reduce"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("CUDA out of memory."), False),
    ],
)
def test_should_reduce_batch_size_recognises_out_of_memory_errors(exception: Exception, reduce: bool) -> None:
    assert should_reduce_batch_size(exception) is reduce


def test_the_size_is_halved_until_it_fits() -> None:
    train = Recorder(fits=20)
    found = find_executable_batch_size(train, starting_batch_size=128)
    assert found("x", lr=1) == (16, ("x",), {"lr": 1})
    assert train.sizes == [128, 64, 32, 16]


def test_a_smaller_batch_size_is_an_event_of_the_run() -> None:
    run_records.clear()
    find_executable_batch_size(Recorder(fits=20), starting_batch_size=32)()
    (event,) = run_records
    assert isinstance(event, Event)
    assert event.name == "out_of_memory"
    assert event.text == "the batch size is now 16, and was 32"


def test_decorator_with_and_without_arguments() -> None:
    @find_executable_batch_size
    def first(batch_size: int) -> int:
        """Doc."""
        return batch_size

    @find_executable_batch_size(starting_batch_size=10)
    def second(batch_size: int) -> int:
        return batch_size

    assert (first(), second()) == (128, 10)
    assert first.__name__ == "first"
    assert first.__doc__ == "Doc."


def test_the_size_that_was_found_is_tried_first_next_time() -> None:
    train = Recorder(fits=40)
    found = find_executable_batch_size(train, starting_batch_size=64)
    found()
    found()
    assert train.sizes == [64, 32, 32]


@pytest.mark.parametrize("takes_size", [True, False])
def test_a_custom_reduction_sets_the_next_batch_size(takes_size: bool) -> None:
    sizes = iter([7, 5, 3])
    train = Recorder(fits=3)
    reduction: Any = (lambda size: size - 2) if takes_size else (lambda: next(sizes))
    find_executable_batch_size(train, starting_batch_size=9, reduce_batch_size_fn=reduction)()
    assert train.sizes == [9, 7, 5, 3]


def test_a_reduction_that_does_not_reduce_is_refused() -> None:
    found = find_executable_batch_size(Recorder(fits=0), 8, reduce_batch_size_fn=lambda size: size)
    with pytest.raises(ValueError, match="reduce_batch_size_fn=8: this is not smaller than 8"):
        found()


def test_reaching_batch_size_zero_raises_the_out_of_memory_message() -> None:
    train = Recorder(fits=0)
    with pytest.raises(
        RuntimeError, match="No executable batch size found, reached zero.*Tried to allocate 2 GiB"
    ):
        find_executable_batch_size(train, starting_batch_size=4)()
    assert train.sizes == [4, 2, 1]


def test_starting_at_zero_is_refused() -> None:
    with pytest.raises(RuntimeError, match="No executable batch size found"):
        find_executable_batch_size(Recorder(fits=1), starting_batch_size=0)()


@pytest.mark.parametrize("size", ["8", 2.5, None])
def test_a_start_that_is_not_a_whole_number_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match=f"starting_batch_size={size!r}: it is not a whole number"):
        find_executable_batch_size(Recorder(1), starting_batch_size=size)


def test_other_exceptions_pass() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        raise KeyError("column")

    with pytest.raises(KeyError, match="column"):
        train()


@pytest.mark.parametrize(("args", "kwargs"), [((128, "a", "b"), {}), (("a",), {"batch_size": 128})])
def test_a_batch_size_from_the_caller_is_refused(args: Any, kwargs: Any) -> None:
    @find_executable_batch_size
    def train(batch_size: int, first: str, second: str) -> None: ...

    with pytest.raises(TypeError, match="Batch size was passed into `train` as the first argument"):
        train(*args, **kwargs)


def test_tensors_of_a_failed_attempt_are_freed_before_the_next() -> None:
    class Activation:
        pass

    held: list[weakref.ref[Activation]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> bool:
        gc.collect()
        alive = any(ref() is not None for ref in held)
        activation = Activation()
        held.append(weakref.ref(activation))
        if batch_size > 1:
            raise MemoryError
        return alive

    assert train() is False
