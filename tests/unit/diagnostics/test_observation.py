"""What a rank is seen to do."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import DEVICE, Activity, Limits, Report
from accelerate.diagnostics.observation import ThreadObserver, watch_iterator
from accelerate.ops import FlightRecorder


@pytest.fixture
def ring() -> FlightRecorder:
    ring = FlightRecorder()
    ring.reset()
    return ring


def test_an_operation_is_a_wait_with_its_name_and_line(ring: FlightRecorder) -> None:
    observer = ThreadObserver(ring, 1, "host", 7)
    assert observer.current_wait() == (None, 0.0)
    ring.begin("gather", None)
    time.sleep(0.01)
    token, seconds = observer.current_wait()
    state = observer.state()
    ring.end()
    assert (token, state.activity, state.operation, state.sequence) == (1, Activity.COLLECTIVE, "gather", 1)
    assert seconds >= 0.01
    assert (state.rank, state.host, state.pid, state.file) == (1, "host", 7, __file__)
    assert observer.state().activity == Activity.OTHER_CODE


@pytest.mark.parametrize("in_torch", [False, True])
def test_an_observation_keeps_no_tensors_of_the_training_thread(
    ring: FlightRecorder, monkeypatch: pytest.MonkeyPatch, in_torch: bool
) -> None:
    observer = ThreadObserver(ring, 0, "host", 7)
    monkeypatch.setattr(processes, "may_wait", lambda _: in_torch)

    def train() -> weakref.ref[torch.Tensor]:
        activations = torch.zeros(3)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(observer.current_wait).result()[1] < 1
        return weakref.ref(activations)

    assert train()() is None


def test_a_frame_that_is_entered_again_begins_a_wait(
    ring: FlightRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = ThreadObserver(ring, 0, "host", 7)
    monkeypatch.setattr(processes, "may_wait", lambda _: True)

    def observe() -> object:
        for _ in range(1000):
            time.sleep(0.001)
            frame = processes.innermost(ring.owner or 0)
            tokens = {observer.current_wait()[0] for _ in range(3)}
            if frame is not None and frame.f_code is Condition.wait.__code__ and len(tokens) == 1:
                return tokens.pop()
        pytest.fail("The thread never waited.")

    with ThreadPoolExecutor(1) as pool:
        first, second = (pool.submit(observe).result() for _ in range(2))
    assert first != second


def test_a_backward_waits_only_while_the_processors_are_idle(
    ring: FlightRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = ThreadObserver(ring, 0, "host", 7)
    frame = processes.innermost(ring.owner or 0)
    used = [0.0]
    clock = [0.0]
    monkeypatch.setattr(processes, "innermost", lambda _: frame)
    monkeypatch.setattr(processes, "may_wait", lambda _: True)
    monkeypatch.setattr(processes, "may_compute", lambda _: True)
    # The frame goes on by itself within this function: it is made to look still.
    monkeypatch.setattr("accelerate.diagnostics.observation.time.process_time", lambda: used[0])
    monkeypatch.setattr("accelerate.diagnostics.observation.time.monotonic", lambda: clock[0])

    found = []
    for seconds, work in ((0.0, 0.0), (10.0, 1.0), (20.0, 19.0)):
        clock[0], used[0] = seconds, work
        found.append(observer.current_wait())
    observer.release()
    assert [seconds for _, seconds in found] == [0.0, 10.0, 0.0]
    assert found[2][0] is None


def test_a_line_that_does_not_advance_waits_for_unfinished_collectives_of_the_device(
    ring: FlightRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = ThreadObserver(ring, 0, "host", 7)
    frame = processes.innermost(ring.owner or 0)
    clock, on_device = [0.0], [0.0]
    monkeypatch.setattr(processes, "innermost", lambda _: frame)
    monkeypatch.setattr("accelerate.diagnostics.observation.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("accelerate.diagnostics.observation.seconds_on_device", lambda: on_device[0])
    assert frame is not None
    standing = {"f_lasti": 1, "f_code": frame.f_code, "f_back": None, "f_trace": None, "f_trace_lines": True}
    still = type("Frame", (), standing)()  # the real one goes on by itself
    monkeypatch.setattr(processes, "innermost", lambda _: still)

    found = []
    for seconds, unfinished in ((0.0, 9.0), (1.0, 9.0), (30.0, 0.0), (40.0, 35.0), (50.0, 70.0)):
        clock[0], on_device[0] = seconds, unfinished
        found.append(observer.current_wait())
    assert [seconds for _, seconds in found] == [0.0, 0.0, 0.0, 35.0, 50.0]
    assert found[-1][0] == ("device", 0.0)

    monkeypatch.setattr(processes, "innermost", lambda _: frame)
    monkeypatch.setattr(ThreadObserver, "current_wait", lambda self: (("device", 0.0), 50.0))
    state = observer.state()
    assert (state.activity, state.operation, state.file) == (Activity.TORCH, DEVICE, __file__)


NAME = "accelerate-loader"


class Kept:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reported = threading.Event()

    def publish(self, report: Report) -> None:
        self.texts.append(report.text)
        self.reported.set()

    def withdraw(self, text: str) -> None:
        self.texts.append(text)


class Gated(Dataset[int]):
    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.gate.acquire()
        return index


def start_pass(seconds: float) -> tuple[Kept, Any, Any]:
    gate = torch.multiprocessing.get_context("fork").Semaphore(0)
    loader = DataLoader(Gated(gate), batch_size=None, num_workers=1, multiprocessing_context="fork")
    kept, batches = Kept(), iter(loader)
    watch_iterator(batches, Limits(seconds, False), kept)  # type: ignore[arg-type]
    return kept, gate, batches


def is_watched() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


def test_a_long_wait_and_its_end_are_reported() -> None:
    kept, gate, batches = start_pass(0.2)

    def release_when_reported() -> None:
        kept.reported.wait(30)
        for _ in range(2):
            gate.release()

    helper = threading.Thread(target=release_when_reported)
    helper.start()
    assert list(batches) == [0, 1]
    helper.join()
    deadline = time.monotonic() + 20
    while kept.texts[-1] != "accelerate: the batch has come." and time.monotonic() < deadline:
        time.sleep(0.02)
    first, *_, last = kept.texts
    assert first.startswith("accelerate: waiting for data: rank 0 waits for a batch, "), first
    assert "worker 0 (process " in first
    assert last == "accelerate: the batch has come."


def test_an_epoch_without_long_waits_reports_nothing_and_its_thread_ends() -> None:
    kept, gate, batches = start_pass(10.0)
    for _ in range(2):
        gate.release()
    assert is_watched()
    assert list(batches) == [0, 1]
    del batches
    gc.collect()
    deadline = time.monotonic() + 20
    while is_watched() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_watched()
    assert kept.texts == []
