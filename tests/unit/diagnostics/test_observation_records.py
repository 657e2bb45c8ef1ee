"""Entries of torch's flight recorder, replaced by one with the format of torch 2.13."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from accelerate import torch_private
from accelerate.diagnostics import observation


def entry(number: int, state: str, group: tuple[str, str] = ("0", "default_pg"), **changed: Any) -> Any:
    return {
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "process_group": group,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "state": state,
        "is_p2p": False,
        "time_created_ns": int((time.time() - 10 + number) * 1e9),
        **changed,
    }


def play(monkeypatch: pytest.MonkeyPatch, name: str, entries: list[Any], status: dict[str, Any]) -> None:
    def dump(*, includeStackTraces: bool) -> bytes:  # noqa: N803  # torch's own spelling
        assert not includeStackTraces
        return pickle.dumps({"entries": entries, "pg_status": status})

    monkeypatch.setattr(torch_private, name, dump)


@pytest.fixture(autouse=True)
def no_recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in observation._DUMPS:
        monkeypatch.setattr(torch_private, name, None)


def test_progress_and_last_collective_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(1, "completed"), entry(2, "scheduled"), entry(5, "completed", ("1", ""))]
    status = {"0": {"last_enqueued_collective": 2, "last_completed_collective": 1}}
    play(monkeypatch, "dump_fr_trace", entries, status)
    assert observation.describe_recorded() == (
        "default_pg: 1 of 2 collectives completed, the last one is #2 nccl:all_reduce of [3, 4] Float; "
        "1: the last one is #5 nccl:all_reduce of [3, 4] Float"
    )
    assert observation.seconds_on_device() == 0.0  # those of the CPU are waited for by the thread itself


def test_the_oldest_unfinished_collective_of_a_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        entry(1, "completed"),
        entry(2, "scheduled", is_p2p=True),
        entry(3, "started"),
        entry(4, "scheduled"),
    ]
    play(monkeypatch, "dump_nccl_trace", entries, {})
    assert 7 <= observation.seconds_on_device() < 8


def test_a_device_without_unfinished_collectives_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "dump_nccl_trace", [entry(1, "completed")], {})
    assert observation.seconds_on_device() == 0.0
