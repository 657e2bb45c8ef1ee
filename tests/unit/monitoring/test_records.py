"""Records: what is written is read, a damaged line is counted, and later starts append to the file."""

from __future__ import annotations

import math
import socket
import sys
from pathlib import Path

import pytest

from accelerate.base import patch_environment
from accelerate.monitoring import (
    PHASES,
    Checkpoint,
    Conclusion,
    End,
    Event,
    RankTimes,
    Record,
    RecordWriter,
    Setting,
    Start,
    Values,
    Window,
    decode,
    find_records,
    recorded_rank,
    without_host,
)

START = Start(
    time=1.0,
    rank=0,
    world_size=2,
    pid=7,
    script="train.py",
    versions={"torch": "2.13.0"},
    settings=[Setting(name="mixed_precision", value="bf16", source="variable")],
)
WINDOW = Window(time=2.0, first=1, last=4, seconds=1.0, seconds_by=dict.fromkeys(PHASES, 0.125), memory=10)
RECORDS: list[Record] = [
    START,
    WINDOW,
    Values(time=3.0, step=None, values={"loss": 1.5, "note": "text"}),
    Checkpoint(time=4.0, event="committed", path="checkpoint_0", step=4, seconds=0.5, size=100),
    Event(time=5.0, name="warning", step=4, text="disk is slow"),
    RankTimes(time=6.0, first=1, last=4, compute={"mean": 0.1}, slowest=1, slow={"1": 0.5}),
    Conclusion(time=7.0, name="straggler", step=4, text="rank 1"),
    End(time=8.0, how="failed", error="Traceback"),
]


def write(folder: Path, rank: int, *records: Record) -> None:
    writer = RecordWriter(folder, rank)
    writer.write(*records)
    writer.close()


def test_each_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "run_records", 0, *RECORDS)
    (found,) = find_records(tmp_path)
    assert list(found) == RECORDS
    assert found.damaged == 0


def test_files_are_found_by_rank_below_a_project_and_in_the_folder_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run_records"
    for rank in (10, 2, 0):
        write(folder, rank, WINDOW)
    (folder / "notes.txt").write_text("x")
    for place in (tmp_path, folder):
        assert [records.rank for records in find_records(place)] == [0, 2, 10]
    assert find_records(tmp_path / "absent") == []


def test_a_line_cut_by_a_kill_is_counted_and_later_starts_append(tmp_path: Path) -> None:
    write(tmp_path, 0, START, WINDOW)
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    write(tmp_path, 0, START)
    (found,) = find_records(tmp_path)
    assert list(found) == [START, START]
    assert found.damaged == 1


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 0, Values(time=1.0, step=1, values={"loss": math.nan, "norm": math.inf}))
    (record,) = next(iter([list(found) for found in find_records(tmp_path)]))
    assert isinstance(record, Values)
    assert math.isnan(record.values["loss"])
    assert record.values["norm"] == math.inf


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kind": 1}',
        b'{"kind": "steps", "time": 1}',
        b'{"kind": "end", "time": "now", "how": "finished"}',
        b'{"kind": "values", "time": 1, "step": "x", "values": {}}',
        b'{"kind": "values", "time": 1, "step": 1, "values": []}',
    ],
)
def test_a_damaged_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        decode(line)


def test_newer_kinds_and_fields_are_ignored() -> None:
    assert decode(b'{"kind": "newer", "time": 1}') is None
    assert decode(b'{"kind": "end", "time": 1, "how": "finished", "more": 2}') == End(time=1, how="finished")


def test_starts_of_older_versions_are_read_without_their_host_and_command() -> None:
    line = b'{"kind": "start", "time": 1, "rank": 0, "world_size": 1, "host": "a", "pid": 1, "argv": ["x"]}'
    assert decode(line) == Start(time=1, rank=0, world_size=1, pid=1)


def test_texts_of_reports_are_recorded_without_the_name_of_this_machine() -> None:
    host = socket.gethostname()
    text = f"rank 1 on {host} failed first: rank 2 (process 7 on {host}) on {host}2"
    assert without_host(text) == f"rank 1 failed first: rank 2 (process 7) on {host}2"


def test_windows_of_older_versions_have_no_items_and_no_flops() -> None:
    window = decode(b'{"kind": "steps", "time": 1, "first": 1, "last": 2, "seconds": 1, "seconds_by": {}}')
    assert isinstance(window, Window)
    assert (window.items, window.flops_per_second, window.mfu) == (0, 0, 0)


def test_a_comparison_of_a_replica_group_has_ranks_among_those_of_all_groups() -> None:
    times = RankTimes(time=1.0, first=1, last=2, compute={}, slowest=1, slow={"1": 0.5})
    with patch_environment(ACCELERATE_REPLICA="2"):
        shifted = times.shifted(recorded_rank(0, 2))
    assert (shifted.slowest, shifted.slow) == (5, {"5": 0.5})
    assert times.shifted(recorded_rank(0, 2)) == times


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits of resources")
def test_a_record_that_is_written_in_part_is_an_error(tmp_path: Path) -> None:
    import resource

    writer = RecordWriter(tmp_path, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            writer.write(WINDOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.close()
