"""Where reports are printed and stored."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from accelerate.diagnostics.hang_report import HangReporter, Report
from accelerate.launch import FOLDER_VARIABLE, HANG_KIND, collect

REPORT = Report("accelerate: hang: rank 0 waits.\nstack", 0, True, 1, [], 5.0)


def test_a_report_is_printed_and_kept_until_it_is_withdrawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reporter = HangReporter(0, 2, {FOLDER_VARIABLE: str(tmp_path)})
    reporter.publish(REPORT)
    assert capfd.readouterr().err == f"{REPORT.text}\n"
    assert collect(tmp_path, 1).hang == REPORT.text
    reporter.withdraw("over")
    assert capfd.readouterr().err == "over\n"
    assert collect(tmp_path, 1).hang == ""


def test_the_end_is_a_failure_of_this_rank(tmp_path: Path) -> None:
    HangReporter(1, 2, {FOLDER_VARIABLE: str(tmp_path)}).prepare_end(REPORT)
    (failure,) = collect(tmp_path, 1).failures
    assert (failure.rank, failure.kind, failure.headline) == (1, (HANG_KIND,), "hang: rank 0 waits.")


def test_without_a_launcher_it_is_printed_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = HangReporter(0, 2, {})
    reporter.prepare_end(REPORT)
    reporter.publish(REPORT)
    assert capfd.readouterr().err == f"{REPORT.text}\n"
    assert not list(tmp_path.iterdir())


def sleep_long(started: Any) -> None:
    started.set()
    time.sleep(100)


def test_ending_a_rank_ends_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    started, codes = context.Event(), []
    worker = context.Process(target=sleep_long, args=(started,), daemon=True)
    worker.start()
    assert started.wait(30)
    monkeypatch.setattr("accelerate.diagnostics.hang_report.os._exit", codes.append)
    HangReporter(0, 2, {}).end()
    worker.join(30)
    assert (codes, worker.exitcode) == ([1], -signal.SIGKILL)
