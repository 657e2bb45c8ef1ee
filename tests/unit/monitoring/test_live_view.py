"""View of a run from its records, while the run starts, trains, restarts and ends."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from accelerate.monitoring import (
    PHASES,
    Checkpoint,
    Conclusion,
    End,
    RankTimes,
    Record,
    RunReader,
    RunView,
    Start,
    Window,
    find_records,
    render,
)
from accelerate.monitoring.live_view import RankView
from accelerate.monitoring.records import encode

NOW = 1000.0
SHARES = dict(zip(PHASES, (0.5, 0.0, 0.2, 0.2, 0.1, 0.0, 0.0, 0.0), strict=True))


def start(rank: int, **more: Any) -> Start:
    fields = {"time": NOW - 90, "rank": rank, "world_size": 2, "pid": 10 + rank}
    return Start(**{**fields, **more})


def window(last: int = 1234, **more: Any) -> Window:
    fields: dict[str, Any] = {
        "time": NOW - 1,
        "first": last - 40,
        "last": last,
        "seconds": 2.0,
        "seconds_by": {name: 2 * share for name, share in SHARES.items()},
        "samples": 328,
        "memory": 2**30,
        "peak_memory": 2 * 2**30,
    }
    return Window(**{**fields, **more})


def write(folder: Path, rank: int, *records: Record) -> Path:
    path = folder / f"rank-{rank:05}.jsonl"
    with open(path, "ab") as file:
        file.writelines(encode(record) for record in records)
    return path


def view_of(path: Path, rank: int, *records: Record) -> RankView:
    view = RankView(rank, write(path, rank, *records))
    view.read()
    return view


def show(ranks: Iterable[RankView], num_ranks: int = 2, gone: tuple[int, ...] = (), width: int = 100) -> str:
    run = RunView("train.py", list(ranks), num_ranks, NOW, lambda start: start.pid not in gone)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(render(run))
    return console.export_text()


def row(text: str, rank: int) -> str:
    (line,) = re.findall(rf"^│ +{rank} .*$", text, re.MULTILINE)
    return str(line)


def test_it_shows_throughput_phases_memory_and_state(tmp_path: Path) -> None:
    ranks = [
        view_of(tmp_path, 0, start(0), window(values={"loss": 0.25})),
        view_of(tmp_path, 1, start(1), window(peak_memory=3 * 2**30)),
    ]
    text = show(ranks)
    assert "0:01:30 · step 1,234 · 20.5 steps/s · 164 samples/s on each rank" in text
    assert "loss 0.25" in text
    assert "data 50%  ■ forward 20%  ■ backward 20%  ■ collectives 10%" in text
    assert text.count("█") == 72
    assert row(text, 1).split()[1:-1] == ["1", "1,234", "50%", "10%", "1.0", "GB", "3.0", "GB", "running"]
    assert "most memory: rank 1, 3.0 GB at its peak" in text


def test_ranks_without_records_are_starting(tmp_path: Path) -> None:
    assert "2 of 2 ranks are starting" in show([])
    assert "1 of 2 ranks are starting" in show([view_of(tmp_path, 1, start(1), window())])


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([start(1)], "before the first step"),
        ([start(1), window(time=NOW - 40)], "no report for 40 s"),
        ([start(1), window(time=NOW - 40, seconds=30.0)], "running"),
        ([start(1), window(), End(time=NOW, how="failed")], "failed"),
        ([start(1, pid=99), window(), End(time=NOW, how="finished")], "finished"),
        ([start(1, pid=99), window()], "ended"),
    ],
)
def test_the_state_of_a_rank(records: list[Record], expected: str, tmp_path: Path) -> None:
    ranks = [view_of(tmp_path, 0, start(0), window()), view_of(tmp_path, 1, *records)]
    assert row(show(ranks, gone=(99,)), 1).rstrip(" │").endswith(f"  {expected}")


def test_a_start_clears_the_records_before_it(tmp_path: Path) -> None:
    failed = Conclusion(time=NOW, name="data-bound", step=3, text="waits"), End(time=NOW, how="failed")
    old = view_of(tmp_path, 1, start(1), window(), *failed)
    ranks = [view_of(tmp_path, 0, start(0), window(), *failed, start(0, attempt=2)), old]
    text = show(ranks)
    assert "2 restarts" in text
    assert "before the first step" in row(text, 0)
    assert "starting" in row(text, 1)


def test_it_shows_the_slowest_rank(tmp_path: Path) -> None:
    times = RankTimes(
        time=NOW, first=1, last=9, compute={"least": 1.0, "mean": 1.025, "most": 1.4}, slowest=7
    )
    text = show([view_of(tmp_path, 0, start(0, world_size=16), window(), times)])
    assert "slowest of 16 ranks: rank 7, 40% slower in its own work than the mean of the others" in text


def test_the_end_of_the_epoch_is_shown_if_it_is_known(tmp_path: Path) -> None:
    first = window(batch=40, num_batches=200, time=NOW - 11)
    text = show([view_of(tmp_path, 0, start(0), first, window(batch=50, num_batches=200))])
    assert "epoch: batch 50 of 200, 0:02:30 left" in text
    assert "epoch" not in show([view_of(tmp_path, 1, start(1), window(batch=50))])


def test_the_last_checkpoint_has_an_age(tmp_path: Path) -> None:
    saves = [
        Checkpoint(time=time, event="committed", path=f"runs/a/checkpoint_{number}", step=1)
        for number, time in enumerate((NOW - 30, NOW - 12))
    ]
    text = show([view_of(tmp_path, 0, start(0), window(), *saves)])
    assert "last checkpoint: runs/a/checkpoint_1, 12 s ago" in text


def test_each_conclusion_that_holds_is_shown_once(tmp_path: Path) -> None:
    texts = ("data-bound: steps wait for data 50% of the time.", "another")
    ranks = [
        view_of(
            tmp_path,
            rank,
            start(rank),
            window(conclusions=["data-bound"]),
            Conclusion(time=NOW, name="data-bound", step=1, text=text),
            Conclusion(time=NOW, name="straggler", step=1, text="straggler: rank 1, a while ago"),
        )
        for rank, text in enumerate(texts)
    ]
    text = show(ranks)
    assert texts[0] in text
    assert texts[1] not in text
    assert "straggler" not in text


def test_only_unusual_ranks_of_many_are_shown(tmp_path: Path) -> None:
    compute = {"least": 1.0, "mean": 1.0, "most": 1.4}
    more: dict[int, list[Record]] = {
        0: [RankTimes(time=NOW, first=1, last=9, compute=compute, slowest=60)],
        40: [window(peak_memory=2**32)],
        50: [End(time=NOW, how="failed")],
    }
    ranks = [
        view_of(tmp_path, rank, start(rank, world_size=64), window(), *more.get(rank, ()))
        for rank in range(64)
    ]
    text = show(ranks, num_ranks=64)
    shown = [int(number) for number in re.findall(r"^│ +(\d+) +1,234", text, re.MULTILINE)]
    assert shown == [0, 1, 2, 3, 4, 40, 50, 60]
    assert "and 56 other ranks" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int, tmp_path: Path) -> None:
    save = Checkpoint(time=NOW, event="committed", path="/long" * 60, step=1)
    ranks = [view_of(tmp_path, 0, start(0), window(values={"loss": float("nan")}), save)]
    assert max(len(line) for line in show(ranks, width=width).splitlines()) == width


def test_a_reader_reads_each_line_once_and_only_complete_and_valid_ones(tmp_path: Path) -> None:
    path = write(tmp_path, 0, start(0, world_size=1), window(10))
    reader = RunReader("run", lambda: [(records.rank, records.path) for records in find_records(tmp_path)])
    assert [rank.window.last for rank in reader.read().ranks if rank.window] == [10]
    line = encode(window(20))
    with open(path, "ab") as file:
        file.write(b"damaged\n" + line[:30])
    assert [rank.window.last for rank in reader.read().ranks if rank.window] == [10]
    with open(path, "ab") as file:
        file.write(line[30:])
    assert [rank.window.last for rank in reader.read().ranks if rank.window] == [20]
    assert not reader.read().has_ended
    write(tmp_path, 0, End(time=NOW, how="finished"))
    assert reader.read().has_ended


def test_ranks_of_a_larger_run_before_are_left_out(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, start(rank, world_size=4), window())
    for rank in range(2):
        write(tmp_path, rank, start(rank, time=NOW - 5), window())
    view = RunReader(
        "run", lambda: [(records.rank, records.path) for records in find_records(tmp_path)]
    ).read()
    assert ([rank.rank for rank in view.ranks], view.num_ranks) == ([0, 1], 2)


def test_a_run_that_starts_later_replaces_the_one_before(tmp_path: Path) -> None:
    folders = [tmp_path / "first"]
    reader = RunReader("run", lambda: [(records.rank, records.path) for records in find_records(folders[-1])])
    folders[0].mkdir()
    for rank in range(2):
        write(folders[0], rank, start(rank, world_size=2), window(10))
    assert len(reader.read().ranks) == 2
    folders.append(tmp_path / "second")
    folders[1].mkdir()
    for rank in range(2):
        write(folders[1], rank, start(rank, world_size=2, time=NOW + 1), window(5))
    view = reader.read()
    assert [(rank.rank, rank.window.last) for rank in view.ranks if rank.window] == [(0, 5), (1, 5)]


def test_a_file_that_another_run_replaces_is_read_from_its_beginning(tmp_path: Path) -> None:
    view = view_of(tmp_path, 0, start(0, world_size=1), window(10), window(20))
    view.path.unlink()
    view.read()
    write(tmp_path, 0, start(0, world_size=1), window(5))
    view.read()
    assert view.window is not None
    assert view.window.last == 5


def test_it_shows_items_of_all_ranks_and_flops_as_the_mean_of_the_ranks(tmp_path: Path) -> None:
    counted: dict[str, Any] = {"items": 5000.0, "flops_per_second": 4e14, "mfu": 0.4}
    ranks = [
        view_of(tmp_path, 0, start(0), window(**counted)),
        view_of(tmp_path, 1, start(1), window(**counted | {"flops_per_second": 5e14, "mfu": 0.5})),
    ]
    assert "2500 items/s · 450 TFLOP/s on each rank · MFU 45.0%" in show(ranks)
    (tmp_path / "other").mkdir()
    assert "items/s" not in show([view_of(tmp_path / "other", 0, start(0), window())])


def test_flops_without_the_peak_of_a_device_are_shown_alone(tmp_path: Path) -> None:
    text = show([view_of(tmp_path, 0, start(0, world_size=1), window(flops_per_second=1.5e12))], 1)
    assert "1.5 TFLOP/s on each rank" in text
    assert "MFU" not in text
