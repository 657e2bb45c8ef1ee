"""One process that waits for the workers of its loader."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from accelerate.diagnostics.hang_report import Limits, Report
from accelerate.diagnostics.observation import watch_iterator

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
