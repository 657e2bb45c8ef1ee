"""Reading: what the records of all ranks say together, and files that are damaged or hostile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate.base import ConfigurationError
from accelerate.monitoring import Checkpoint, End, Event, Record, RecordWriter, Setting, Start, Values, Window
from accelerate.report import Run, read_run, summarize

from .recorded_run import BEGIN, DIGEST, RESTART_AT, RESTART_FROM, STEPS, steps, write_run


def write(folder: Path, rank: int, *records: Record) -> None:
    writer = RecordWriter(folder / "run_records", rank)
    writer.write(*records)
    writer.close()


def start(rank: int, world_size: int = 2, **kwargs: object) -> Start:
    return Start(time=1.0, rank=rank, world_size=world_size, pid=1, **kwargs)  # type: ignore[arg-type]


def end(how: str, **kwargs: object) -> End:
    return End(time=2.0, how=how, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def recorded(tmp_path: Path) -> Run:
    write_run(tmp_path / "run")
    return read_run(tmp_path / "run")


def test_values_steps_and_starts_are_those_of_the_records(recorded: Run) -> None:
    repeated = RESTART_AT - RESTART_FROM
    assert recorded.name == "run"
    assert (recorded.num_starts, recorded.last_time) == (2, BEGIN + STEPS)
    assert recorded.values["loss"].keys() == {0}
    assert recorded.values["loss"][0].count == STEPS + repeated
    assert recorded.values["loss"][0].invalid == 2
    assert recorded.values["learning_rate"].keys() == {0, 1}
    assert recorded.texts == {"phase": "a"}
    assert recorded.config == {"lr": "0.1", "batch_size": "8"}
    assert [summary.steps for summary in recorded.ranks.values()] == [STEPS + repeated] * 2
    assert recorded.ranks[1].seconds == pytest.approx(2 * recorded.ranks[0].seconds)
    assert recorded.slow == {1: 0.33}


def test_equal_events_are_one_entry_and_a_conclusion_keeps_its_last_text(recorded: Run) -> None:
    warning, hang = recorded.events.in_order()
    assert (warning.count, warning.last_step) == (2, 260)
    assert hang.record.step == 280
    assert len(recorded.conclusions.in_order()) == 1


@pytest.mark.parametrize(
    ("ends", "state", "text"),
    [
        ((["finished"], ["finished"]), "finished", "All ranks finished"),
        ((["stopped"], ["finished"]), "stopped", "by request"),
        ((["finished"], []), "no end", "rank 1"),
        (([], []), "no end", "2 of 2 ranks"),
        ((["failed"], []), "failed", "failed"),
        (([], ["finished", "failed"]), "failed", "failed"),
    ],
)
def test_the_state_of_a_run_follows_from_the_ends_of_its_ranks(
    tmp_path: Path, ends: tuple[list[str], ...], state: str, text: str
) -> None:
    for rank, words in enumerate(ends):
        write(tmp_path, rank, start(rank), *(end(how) for how in words))
    found, sentence = read_run(tmp_path).outcome()
    assert found == state
    assert text in sentence


def test_a_failure_before_a_restart_is_not_the_end(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, start(rank), end("failed", error="old"), start(rank), end("finished"))
    assert read_run(tmp_path).outcome()[0] == "finished"


def test_a_tracker_that_starts_after_the_end_belongs_to_another_start(tmp_path: Path) -> None:
    config = Event(time=3.0, name="config", step=0, text='{"project_name": "second"}')
    write(tmp_path, 0, start(0, world_size=1), end("failed", digest="first"), config)
    run = read_run(tmp_path)
    assert run.outcome()[0] == "no end"
    assert run.config == {"project_name": "second"}


def test_ranks_that_a_smaller_restart_left_out_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 0, start(0), start(0, world_size=1), end("finished"))
    write(tmp_path, 1, start(1))
    assert read_run(tmp_path).outcome()[0] == "finished"


def test_a_checkpoint_of_all_ranks_is_one_entry_and_a_failed_one_is_kept(tmp_path: Path) -> None:
    saved = Checkpoint(time=2.0, event="committed", path="a", step=4, size=7)
    for rank in range(2):
        failed = Checkpoint(time=3.0, event="failed", path="b", step=5 + rank, text="full")
        write(tmp_path, rank, start(rank), replace(saved, step=4 + rank), *([failed] if rank else []))
    entries = read_run(tmp_path).checkpoints.in_order()
    assert [(entry.record.event, entry.record.step) for entry in entries] == [("committed", 4), ("failed", 6)]


def test_logged_values_replace_observed_ones(tmp_path: Path) -> None:
    window = Window(time=2.0, first=1, last=10, seconds=1.0, seconds_by={}, values={"loss": 7.0})
    write(tmp_path, 0, start(0), Values(time=1.0, step=12, values={"loss": 1.0}), window)
    series = read_run(tmp_path).values["loss"][0]
    assert (series.count, series.last) == (1, (12, 1.0))


def test_the_folder_of_records_itself_can_be_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert read_run(tmp_path / "run_records").num_starts == 2


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"kind": "values", "time": 1.0, "step": 1',
        b'{"kind": "steps", "time": NaN, "first": 1, "last": 2, "seconds": 1.0, "seconds_by": {}}',
        b'{"kind": "steps", "time": 1e300, "first": 1, "last": 2, "seconds": 1.0, "seconds_by": {}}',
        b'{"kind": "values", "time": 1.0, "values": {}, "step": ' + b"9" * 400 + b"}",
        b'{"kind": "event", "time": 1.0, "name": "config", "step": 0, "text": "no JSON"}',
        b'{"kind": "event", "time": 1.0, "name": "config", "step": 0, "text": "[1]"}',
    ],
)
def test_a_line_that_cannot_be_used_is_counted_and_the_others_are_read(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, 0, start(0))
    with open(tmp_path / "run_records" / "rank-00000.jsonl", "ab") as file:
        file.write(line + b"\n")
    write(tmp_path, 0, Values(time=3.0, step=1, values={"loss": 1.0}))
    run = read_run(tmp_path)
    assert run.ranks[0].damaged == 1
    assert run.values["loss"][0].count == 1


def test_invalid_numbers_are_left_out(tmp_path: Path) -> None:
    line = {"kind": "steps", "time": 1.0, "first": 1, "last": 2, "seconds": 1.0}
    line |= {"seconds_by": {"data": "long", "forward": 0.5}, "values": {"loss": 10**400, "lr": None}}
    write(tmp_path, 0, start(0))
    with open(tmp_path / "run_records" / "rank-00000.jsonl", "ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
    run = read_run(tmp_path)
    assert run.values["loss"][0].invalid == 1
    assert run.phase_seconds.total() == {"forward": 0.5}


def test_more_names_than_fit_are_counted(tmp_path: Path) -> None:
    values = {f"name {number}": 1.0 for number in range(1000)}
    write(tmp_path, 0, Values(time=1.0, step=1, values=values))
    run = read_run(tmp_path)
    assert (len(run.values), run.left_out) == (200, 800)


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_folder_without_records_is_one_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=rf"^DIR='.*{folder}': .*project_dir"):
        read_run(tmp_path / folder)


def test_the_summary_is_strict_json(recorded: Run) -> None:
    summary = json.loads(json.dumps(summarize(recorded), allow_nan=False))
    assert summary["state"] == "failed"
    assert summary["failures"][0]["digest"] == DIGEST
    assert summary["values"]["loss"]["0"]["not_finite"] == 2
    assert summary["ranks"][1]["slower_than_mean"] == 0.33
    assert summary["checkpoints"][0]["path"] == "checkpoints/checkpoint_0"


def test_items_and_flops_are_those_of_the_windows_that_count_them(tmp_path: Path) -> None:
    first = Window(time=1.0, first=1, last=10, seconds=2.0, seconds_by={}, items=100.0)
    second = replace(first, time=2.0, first=11, last=20, flops_per_second=3e12, mfu=0.25)
    third = replace(second, time=3.0, first=21, last=30, seconds=1.0, flops_per_second=6e12, mfu=0.5)
    write(tmp_path, 0, start(0, 1), first, second, third)
    run = read_run(tmp_path)
    assert run.ranks[0].items == 300
    assert run.ranks[0].flops_per_second == 4e12
    assert run.ranks[0].mfu == pytest.approx(1 / 3)
    assert run.measured["items per second, of all ranks"][0].count == 3
    assert run.measured["TFLOP/s"][0].last == (30, 6.0)
    assert run.measured["model FLOPs utilization"][0].count == 2
    (rank,) = summarize(run)["ranks"]
    assert (rank["items"], rank["flops_per_second"]) == (300, 4e12)


def test_a_run_is_that_of_the_replica_group_with_the_most_steps(tmp_path: Path) -> None:
    settings = [Setting(name="replicas", value="2", source="--replicas")]
    first = start(0, settings=settings)
    write(tmp_path, 0, first, *steps(0, 1, 100, ""), replace(first, time=BEGIN + 200))
    write(tmp_path, 1, start(1, settings=settings), *steps(1, 1, STEPS, ""), end("finished"))
    run = read_run(tmp_path)
    assert (run.first_rank, run.num_group_starts, run.ranks[1].steps) == (1, 1, STEPS)
    assert run.outcome()[0] == "finished"
    assert run.timeline.starts == [1.0]


def test_lines_are_those_of_the_first_ranks_from_the_replica_group_with_the_most_steps(
    tmp_path: Path,
) -> None:
    settings = [Setting(name="replicas", value="20", source="--replicas")]
    for rank in range(20):
        records = steps(rank, 1, 200 if rank == 10 else 100, "")
        write(tmp_path, rank, start(rank, world_size=20, settings=settings), *records)
    run = read_run(tmp_path)
    assert run.first_rank == 10
    assert sorted(run.measured["memory"]) == sorted(run.observed["learning_rate"]) == list(range(10, 18))
