"""Attempts of a run that restarts: the line that the launcher prints, and the records that it writes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate.launch import Failure, NewestCheckpoint
from accelerate.launch.attempts import Attempts
from accelerate.launch.failures import FOLDER_VARIABLE, RESTART_CODE, Exits
from accelerate.monitoring import RecordWriter, Window

KILLED = Exits({0: 1, 1: -9})


def write_failure(folder: Path, rank: int, error: Exception, step: int) -> None:
    failure = Failure.of(error, {"RANK": str(rank), "WORLD_SIZE": "2"}, step)
    assert replace(failure, moment=50.0).write(folder)


def line_of(capfd: pytest.CaptureFixture[str]) -> str:
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("accelerate launch: ")


def test_a_rank_that_was_killed_comes_before_one_that_lost_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_failure(tmp_path, 0, RuntimeError("[gloo/pair.cc:537] Connection reset by peer"), 50)
    NewestCheckpoint("runs/checkpoint_2", 45).write(tmp_path)
    first = Attempts(tmp_path).end(KILLED, 3)
    assert first is not None
    assert first.rank == 1
    assert line_of(capfd) == (
        "rank 1 was ended by SIGKILL after step 50. All processes start again (restart 1 of 3). "
        "The newest checkpoint is runs/checkpoint_2 (step 45)."
    )


@pytest.mark.parametrize(
    ("exits", "is_elastic", "expected"),
    [
        (Exits({0: 3}), False, "rank 0 ended with exit code 3. All processes start again (restart 1 of 3)."),
        (Exits({0: RESTART_CODE}), False, "rank 0 ended with exit code 75. All processes start again (res"),
        (Exits({0: RESTART_CODE}), True, "Another machine was asked to end, has failed, or has joined. All"),
        (Exits({0: -15}, asked=(0,)), True, "Another machine was asked to end, has failed, or has joined."),
    ],
)
def test_the_line_has_the_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exits: Exits, is_elastic: bool, expected: str
) -> None:
    Attempts(tmp_path, is_elastic).end(exits, 3)
    assert line_of(capfd).startswith(expected)


def test_an_error_of_the_script_is_in_the_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_failure(tmp_path, 1, ValueError("bad batch."), 7)
    Attempts(tmp_path).end(KILLED, 1)
    assert line_of(capfd).startswith("rank 1 failed with ValueError: bad batch after step 7. All processes")


def open_records(folder: Path) -> Path:
    """Return the file of records that a process of the run has opened."""
    writer = RecordWriter(folder / "run_records", 0)
    writer.close()
    return writer.path


def read_attempts(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_attempts_are_kept_until_a_process_opens_the_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(tmp_path)
    attempts.end(Exits({0: 3}), 3)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    path = open_records(tmp_path)
    attempts.begin()
    attempts.finish(Exits({0: 0}, attempt=1), 0)
    first, second = read_attempts(path)
    assert (first["kind"], first["number"], first["rank"], first["text"]) == (
        "attempt",
        0,
        0,
        "ended with exit code 3",
    )
    assert (second["number"], second["rank"], second["text"]) == (1, -1, "")
    assert second["began"] >= first["time"]  # type: ignore[operator]
    capfd.readouterr()


def test_the_step_of_a_process_that_left_none_is_that_of_its_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    path = open_records(tmp_path)
    attempts = Attempts(tmp_path)
    writer = RecordWriter(path.parent, 0)
    writer.write(Window(time=time.time() + 1, first=8, last=9, seconds=1.0, seconds_by={}))
    writer.close()
    attempts.end(Exits({0: -9}), 3)
    assert line_of(capfd).startswith("rank 0 was ended by SIGKILL after step 9 or later. All processes")
    attempts.begin()
    monkeypatch.setattr(attempts, "_began", time.time() + 2)  # a later attempt without a step
    attempts.end(Exits({0: -9, 1: -15}, attempt=1, asked=(1,), asked_at=30.0), 3)
    assert line_of(capfd).startswith("rank 0 was ended by SIGKILL. All processes")
    first, second = read_attempts(path)[1:]
    assert (first["step"], first["failed"]) == (9, 0.0)
    assert (second["step"], second["failed"]) == (-1, 30.0)


def test_a_run_without_restarts_has_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    path = open_records(tmp_path)
    Attempts(tmp_path).finish(Exits({0: 0}), 0)
    assert read_attempts(path) == []
