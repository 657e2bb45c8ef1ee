"""Reading ahead in a thread: order, bounds, failures, and an end in every case."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from accelerate.data_loader import MESSAGE_BYTES, RandomDrawDetector, ReadAhead, background


class Item(NamedTuple):
    number: int
    size: int = 8


def readers() -> int:
    return sum(thread.name == "accelerate-read-ahead" for thread in threading.enumerate())


def items(count: int, size: int = 8, read: list[int] | None = None) -> Iterator[Item]:
    for number in range(count):
        if read is not None:
            read.append(number)
        yield Item(number, size)


def read_all(reader: ReadAhead) -> list[int]:
    seen: list[int] = []
    while taken := reader.take():
        seen += [item.number for item in taken]
    return seen


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that in five seconds")


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("size", [8, MESSAGE_BYTES // 2, 3 * MESSAGE_BYTES])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_all_items_come_in_order(stays: bool, size: int, count: int) -> None:
    reader = ReadAhead(items(count, size), lambda: stays)
    assert read_all(reader) == list(range(count))
    reader.close()
    assert readers() == 0


def test_prefetched_items_are_bounded() -> None:
    read: list[int] = []
    reader = ReadAhead(items(100, MESSAGE_BYTES, read), lambda: False)
    assert len(reader.take()) == 1
    wait_until(lambda: len(read) == 3)
    time.sleep(0.05)
    assert len(read) == 3
    reader.close()
    assert readers() == 0


def test_small_items_are_taken_together() -> None:
    reader = ReadAhead(items(100), lambda: False)
    assert [item.number for item in reader.take()] == [0]
    wait_until(lambda: len(reader._read) > 50)
    assert len(reader.take()) > 50
    reader.close()


def test_an_item_is_given_without_waiting_for_a_slow_one() -> None:
    release = threading.Event()

    def slow() -> Iterator[Item]:
        yield Item(0)
        time.sleep(0.02)
        yield Item(1)
        release.wait(10)
        yield Item(2)

    reader = ReadAhead(slow(), lambda: False)
    assert [item.number for item in reader.take()] == [0]
    assert [item.number for item in reader.take()] == [1]
    release.set()
    assert [item.number for item in reader.take()] == [2]
    assert reader.take() == []
    reader.close()


def test_an_error_is_raised_after_the_items_read_before_it() -> None:
    def broken() -> Iterator[Item]:
        yield from items(3)
        raise LookupError("gone")

    reader = ReadAhead(broken(), lambda: False)
    seen: list[int] = []
    with pytest.raises(LookupError, match="gone"):
        while True:
            seen += [item.number for item in reader.take()]
    assert seen == [0, 1, 2]
    reader.close()
    assert readers() == 0


def test_a_read_that_does_not_return_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, states: None, caplog: pytest.LogCaptureFixture
) -> None:
    from accelerate.state import PartialState

    PartialState(cpu=True)
    monkeypatch.setattr(background, "_JOIN_TIMEOUT", 0.05)
    release = threading.Event()

    def stuck() -> Iterator[Item]:
        yield Item(0)
        release.wait(10)
        yield Item(1)

    reader = ReadAhead(stuck(), lambda: False)
    reader.take()
    reader.close()
    assert "still reading samples" in caplog.text
    release.set()
    wait_until(lambda: readers() == 0)


def draw_torch() -> object:
    return torch.rand(1)


def draw_python() -> object:
    return random.random()


def draw_numpy() -> object:
    return np.random.rand()


def draw_own() -> object:
    return torch.rand(1, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("draw", "expected"), [(draw_torch, True), (draw_python, True), (draw_numpy, True), (draw_own, False)]
)
def test_random_draws_of_the_reader_are_detected(draw: Callable[[], object], expected: bool) -> None:
    draws = RandomDrawDetector()
    batches = draws.watch(iter([lambda: None, draw, draw]))
    draw_torch()  # what a sampler draws before the first batch
    for batch in batches:
        batch()
    assert draws.has_drawn() is expected


def test_reading_that_draws_stays_in_its_thread() -> None:
    threads: list[str] = []

    def drawing() -> Iterator[Item]:
        for number in range(5):
            torch.rand(1)
            threads.append(threading.current_thread().name)
            yield Item(number)

    draws = RandomDrawDetector()
    reader = ReadAhead(draws.watch(drawing()), lambda: True)
    assert read_all(reader) == list(range(5))
    assert set(threads) == {threading.current_thread().name}


def test_the_thread_has_the_modes_of_the_user() -> None:
    seen: list[tuple[bool, bool]] = []

    def looking() -> Iterator[Item]:
        for number in range(3):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            yield Item(number)

    for mode, expected in ((torch.no_grad(), (False, False)), (torch.inference_mode(), (False, True))):
        with mode:
            reader = ReadAhead(looking(), lambda: False)
            read_all(reader)
            reader.close()
        assert set(seen) == {expected}
        seen.clear()


ABANDONED = """
import threading
from accelerate.data_loader.background import ReadAhead

class Item:
    size = 1 << 20

def forever():
    while True:
        yield Item()

reader = ReadAhead(forever(), lambda: False)
reader.take()
print(threading.active_count())
"""


def test_the_interpreter_exits_while_a_reader_is_active() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2", "")


def test_a_fork_closes_no_reader_of_its_parent() -> None:
    reader = ReadAhead(iter(items(4)), lambda: False)
    assert reader.take()
    process = os.getpid()
    with reader._changed, pytest.MonkeyPatch.context() as patch:  # as in a fork: no thread holds it
        patch.setattr(os, "getpid", lambda: process + 1)
        closing = threading.Thread(target=reader.close)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    reader.close()
