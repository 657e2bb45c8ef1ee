"""The thread of records never blocks its callers, and gives up after the first error of the file system."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from accelerate.monitoring import Event, RecordThread, RecordWriter, find_records

EVENT = Event(time=1.0, name="warning", step=1, text="x")


def texts_below(folder: Path) -> list[str]:
    return [
        record.text for records in find_records(folder) for record in records if isinstance(record, Event)
    ]


def test_records_are_written_in_order_also_after_a_close(tmp_path: Path) -> None:
    thread = RecordThread(tmp_path, 0)
    for part in range(2):
        for number in range(50):
            thread.put(Event(time=1.0, name="warning", step=1, text=str(50 * part + number)))
        thread.close()
        assert texts_below(tmp_path) == [str(number) for number in range(50 * (part + 1))]
    thread.close()


def test_without_a_folder_and_without_records_there_is_no_thread(tmp_path: Path) -> None:
    for thread in (RecordThread(None, 0), RecordThread(tmp_path, 0)):
        thread.put(*([] if thread.folder else [EVENT]))
        assert "accelerate-records" not in {each.name for each in threading.enumerate()}
        assert thread.flush()
        thread.close()
    assert not list(tmp_path.iterdir())


def test_an_interpreter_that_exits_writes_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = RecordThread(tmp_path, 0)
    thread.put(EVENT)
    thread.put(EVENT)
    thread.close()
    assert texts_below(tmp_path) == ["x", "x"]


@pytest.mark.parametrize(("is_run_ending", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_a_removed_file_is_one_message(
    is_run_ending: bool, level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    thread = RecordThread(tmp_path, 0)
    thread.put(EVENT)
    thread.flush()
    (tmp_path / "rank-00000.jsonl").unlink()
    thread.is_run_ending = is_run_ending
    for _ in range(3):
        thread.put(EVENT)
        thread.flush()
    thread.close()
    assert [record.levelno for record in caplog.records] == [level]


def test_a_file_system_that_does_not_respond_is_waited_for_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    responds = threading.Event()
    monkeypatch.setattr(RecordWriter, "write", lambda *_: responds.wait(60))
    monkeypatch.setattr("accelerate.monitoring.record_thread.CAPACITY", 2)
    monkeypatch.setattr(RecordThread, "SECONDS_TO_END", 0.1)
    thread = RecordThread(tmp_path, 0)
    for _ in range(10):
        thread.put(EVENT)
    assert thread._queue.qsize() <= 2
    assert not thread.flush()
    monkeypatch.setattr(RecordThread, "SECONDS_TO_END", 60.0)
    start = time.monotonic()
    thread.close()
    assert time.monotonic() - start < 30
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == f"The last records of this run are not in {tmp_path}: " + (
        "the file system has not responded for 0.1 s."
    )
    responds.set()
    for each in threading.enumerate():
        if each.name == "accelerate-records":
            each.join(60)
