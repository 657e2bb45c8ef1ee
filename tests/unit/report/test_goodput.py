"""Division of the wall time of a run into parts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate.monitoring import Attempt, Checkpoint, RecordWriter, Start, Window
from accelerate.report.goodput import LOST, PARTS, STEPS, Timeline, measure_goodput
from accelerate.report.reading import read_run


def start(time: float) -> Start:
    return Start(time=time, rank=0, world_size=1, pid=1)


def window(begin: float, first: int, last: int, data: float = 0.0, save: float = 0.0) -> Window:
    """Returns steps of one second each, without data and saves."""
    seconds = last - first + 1 + data + save
    phases = {"data": data, "saving": save}
    return Window(time=begin + seconds, first=first, last=last, seconds=seconds, seconds_by=phases)


def attempt(number: int, began: float, time: float, text: str = "", failed: float = 0.0) -> Attempt:
    return Attempt(
        time=time, number=number, began=began, rank=1 if text else -1, text=text, failed=failed, step=12
    )


def write(folder: Path, *records: object) -> None:
    writer = RecordWriter(folder / "run_records", 0)
    writer.write(*records)  # type: ignore[arg-type]
    writer.close()


def test_parts_of_a_run_that_restarts(tmp_path: Path) -> None:
    write(
        tmp_path,
        start(103),
        window(105, 1, 10, data=2, save=1),
        Checkpoint(time=118, event="committed", path="c", step=10, blocked=1.0),
        window(118, 11, 14),
        attempt(0, 100, 126, "was ended by SIGKILL", failed=123),
        start(130),
        Checkpoint(time=131, event="loaded", path="c", step=10, seconds=1.0),
        window(132, 11, 20),
        attempt(1, 126, 143),
    )
    found = read_run(tmp_path).goodput()
    assert found is not None
    assert found.seconds_by == {
        STEPS: 20,
        LOST: 5,  # four steps, and a second before the failure
        "startup": 10,
        "restore": 1,
        "data": 2,
        "members": 0,
        "save": 1,
        "stopping": 3,
        "other": 1,
    }
    assert found.wall == 43
    assert found.fraction == pytest.approx(20 / 43)
    assert found.lost_by_cause == {"was ended by SIGKILL": 5}
    assert found.save_interval == pytest.approx((2 * 1.0 * 43) ** 0.5)
    assert found.lines()[-1] == "1 failure suggests a save every 9 s"


def test_steps_without_a_record_are_not_lost_if_a_checkpoint_has_them(tmp_path: Path) -> None:
    write(
        tmp_path,
        start(100),
        window(100, 1, 4),
        attempt(0, 100, 109, "was ended by SIGKILL", failed=107),  # in step 8
        start(110),
        window(110, 7, 8),
        attempt(1, 109, 112),
    )
    found = read_run(tmp_path).goodput()
    assert found is not None
    assert (found.seconds_by[STEPS], found.seconds_by[LOST]) == (8, 1)


def test_a_run_with_replica_groups_waits_for_members_and_loses_steps_that_are_not_committed(
    tmp_path: Path,
) -> None:
    record = replace(window(104, 1, 10, data=3, save=1), recovery={"members": 2.0, "lost": 1.5})
    write(tmp_path, start(100), record, attempt(0, 100, 118))
    found = read_run(tmp_path).goodput()
    assert found is not None
    assert found.seconds_by == {
        **dict.fromkeys(PARTS, 0.0),
        STEPS: 8.5,
        LOST: 1.5,
        "startup": 4,
        "data": 1,
        "members": 2,
        "save": 1,
    }
    assert found.lost_by_cause == {"replica groups ended during a step": 1.5}


def test_an_attempt_that_ends_before_its_first_record_counts(tmp_path: Path) -> None:
    first = attempt(0, 100, 101, "ended with exit code 3")
    write(tmp_path, start(105), first, window(106, 1, 4), attempt(1, 101, 110))
    run = read_run(tmp_path)
    found = run.goodput()
    assert found is not None
    assert run.num_attempts == 2
    assert [failure.text for failure in found.failures] == ["ended with exit code 3"]
    assert found.wall == 10
    assert (found.seconds_by[STEPS], found.seconds_by["startup"]) == (4, 6)
    assert found.save_interval is None


def test_a_run_without_restarts_has_no_attempts(tmp_path: Path) -> None:
    write(tmp_path, start(100), window(102, 1, 8))
    found = read_run(tmp_path).goodput()
    assert found is not None
    assert (found.wall, found.seconds_by[STEPS], found.seconds_by["startup"]) == (10, 8, 2)
    assert found.lines() == ["goodput 80.0% of 10.0 s: steps 80.0%, startup 20.0%"]


def test_of_several_machines_the_record_with_the_cause_is_kept() -> None:
    lost = attempt(0, 100.5, 111, "lost its connection to another rank")
    cause = replace(attempt(0, 100, 110, "failed"), is_cause=True)
    last = attempt(1, 111, 120)
    assert Timeline(attempts=[last, lost, cause, last]).merged_attempts() == [cause, last]


def test_launches_in_one_folder_are_separate_spans(tmp_path: Path) -> None:
    write(tmp_path, start(5), window(10, 1, 10))
    for began in (100, 1000):
        first, second = attempt(0, began, began + 20, "failed"), attempt(1, began + 20, began + 60)
        write(tmp_path, start(began + 5), first, start(began + 25), second)
    found = read_run(tmp_path).goodput()
    assert found is not None
    assert found.wall == 15 + 60 + 60
    assert len(found.failures) == 2


def test_steps_that_any_later_attempt_repeats_are_lost(tmp_path: Path) -> None:
    ends = [(100, 1, 100), (300, 81, 120), (400, 61, 160)]
    for number, (began, first, last) in enumerate(ends):
        write(tmp_path, start(began), window(began, first, last))
        write(tmp_path, attempt(number, began, began + last - first + 1, "failed" if number < 2 else ""))
    found = read_run(tmp_path).goodput()
    assert found is not None
    assert found.seconds_by[STEPS] == 160
    assert found.seconds_by[LOST] == 40 + 40


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_the_wall_time(seed: int) -> None:
    chance, timeline, now, step = random.Random(seed), Timeline(), 1000.0, 0
    for number in range(chance.randint(1, 6)):
        began = now
        now += chance.uniform(0, 5)
        timeline.add_start(start(now))
        step = chance.randint(0, step)
        for _ in range(chance.randint(0, 5)):
            record = window(now, step + 1, step + chance.randint(1, 9))
            recovery = {"members": chance.uniform(0, 0.3), "lost": chance.uniform(0, 2)}
            timeline.add_window(record, {"data": 0.2, "saving": 0.1}, recovery)
            now, step = record.time, record.last
        failed = now + chance.uniform(0, 1)
        now = failed + chance.uniform(0, 1)
        timeline.attempts.append(attempt(number, began, now, "failed", failed))
    found = measure_goodput(timeline, now)
    assert found is not None
    assert list(found.seconds_by) == list(PARTS)
    assert min(found.seconds_by.values()) >= 0
    assert found.wall == pytest.approx(now - 1000.0, rel=0.005)
