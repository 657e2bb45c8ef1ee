"""A thread that waits for a batch, and what is said of the workers."""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accelerate.base import stack_dumps
from accelerate.data_loader import ReadAhead
from accelerate.diagnostics import observation, processes
from accelerate.diagnostics.hang_report import Activity
from accelerate.diagnostics.observation import ThreadObserver
from accelerate.ops import FlightRecorder

SOURCE = Path(__file__).read_text().splitlines()


class Numbers(Dataset[int]):
    """Acts before it gives number 1."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            self.act()  # ACTS
        return index


class Late:
    """Takes long to be pickled."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[Any, ...]:
        self.gate.acquire()  # PICKLES
        return (int, ())


class Item(int):
    size = 1


def line_of(tag: str) -> int:
    return next(number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {tag}"))


@contextmanager
def waiting(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """A thread that runs some work, which must end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive()


def look_until(thread: threading.Thread, is_it: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        wait = observation.find_wait(processes.innermost(thread.ident or 0))
        if is_it(wait):
            return wait
        time.sleep(0.01)
    pytest.fail("the thread never waited so")


def is_for_batch(number: int) -> Callable[[Any], bool]:
    return lambda wait: wait is not None and wait.token[1] == number


def describe_until(wait: Any, said: str) -> str:
    deadline = time.monotonic() + 20
    while (
        not re.search(said, text := observation.describe_wait(wait), re.DOTALL)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return text


def test_a_worker_is_named_with_its_line_and_what_is_not_stuck_with_none() -> None:
    gate = torch.multiprocessing.get_context("fork").Semaphore(0)
    assert stack_dumps.offer()
    loader = DataLoader(Numbers(gate.acquire), batch_size=None, num_workers=2, multiprocessing_context="fork")
    with waiting(lambda: list(loader)) as thread:
        wait = look_until(thread, is_for_batch(1))
        said = (
            rf"worker 1 \(process \d+\), which owes the next batch, sleeps.*line {line_of('ACTS')}, in __get"
            r".*worker 0 \(process \d+\) sleeps[^:]*$"  # its batch has arrived
        )
        text = describe_until(wait, said)
        again = observation.find_wait(processes.innermost(thread.ident or 0))
        gate.release()
    assert re.search(said, text, re.DOTALL), text
    assert "line 1 in" not in text
    assert again is not None
    assert again.token == wait.token


def test_a_stopped_worker_is_reported_as_stopped() -> None:
    loader = DataLoader(
        Numbers(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    with waiting(lambda: list(loader)) as thread:
        # It may stop before its thread has sent the batch before.
        wait = look_until(thread, lambda wait: wait is not None)
        text = describe_until(wait, "stopped")
        os.kill(wait.iterator._workers[0].pid, signal.SIGCONT)
    assert "which owes the next batch, is stopped by a signal" in text


def test_a_thread_of_a_worker_that_cannot_send_is_shown() -> None:
    gate = torch.multiprocessing.get_context("fork").Semaphore(0)
    assert stack_dumps.offer()
    numbers = Numbers(lambda: None)
    loader = DataLoader(
        numbers,
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=lambda number: Late(gate) if number == 1 else number,
    )
    with waiting(lambda: list(loader)) as thread:
        wait = look_until(thread, is_for_batch(1))
        text = describe_until(wait, "PICKLES")
        gate.release()
    assert f"line {line_of('PICKLES')}, in __reduce__" in text.partition("another thread of it is at:")[2]


def test_a_thread_that_reads_ahead_is_examined() -> None:
    gate = threading.Event()

    def read() -> Iterator[Item]:
        yield Item(0)
        gate.wait()  # READS
        yield Item(1)

    reader = ReadAhead(read(), lambda: False)
    with waiting(lambda: [reader.take() for _ in range(3)]) as thread:
        expected = f"line {line_of('READS')}, in read"
        look_until(thread, lambda wait: wait is not None and expected in observation.describe_wait(wait))
        gate.set()
    reader.close()


def test_an_observer_counts_the_seconds_of_one_wait() -> None:
    gate = torch.multiprocessing.get_context("fork").Semaphore(0)
    loader = DataLoader(Numbers(gate.acquire), batch_size=None, num_workers=1, multiprocessing_context="fork")
    ring = FlightRecorder()
    observer = ThreadObserver(ring, 2, "host", 7)

    def read() -> None:
        ring.reset()
        list(loader)

    with waiting(read) as thread:
        look_until(thread, is_for_batch(1))
        first = observer.current_wait()
        time.sleep(0.02)
        second, state = observer.current_wait(), observer.state()
        gate.release()
    assert first[0] == second[0]
    assert (first[0][0], first[1] < 0.01 < second[1]) == (Activity.DATA, True)  # type: ignore[index]
    assert (state.activity, state.rank, state.file) == (Activity.DATA, 2, __file__)
    assert "waits for the workers of its loader" in state.details
    assert observer.current_wait() == (None, 0.0)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_dataset_that_process_0_reads_for_all_is_named_while_it_waits(in_thread: bool) -> None:
    """Also for the first items, which no other thread reads."""
    rows: queue.Queue[Any] = queue.Queue()
    if in_thread:
        rows.put(SimpleNamespace(size=1))

    def take_all() -> None:
        reader = ReadAhead(iter(rows.get, None), lambda: False)
        while reader.take():
            pass
        reader.close()

    with waiting(take_all) as thread:
        wait = look_until(thread, lambda wait: wait and "in get" in observation.describe_wait(wait))
        rows.put(None)
    assert wait.source == "the dataset of rank 0"
