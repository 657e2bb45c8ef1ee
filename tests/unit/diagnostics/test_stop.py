"""Sources of requests to stop or to save."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerate.base import ConfigurationError
from accelerate.diagnostics import (
    ALLOCATION_ENDS,
    PREEMPTION,
    SAVE_FILE,
    SIGNALS,
    STOP_FILE,
    TIME_IS_UP,
    TRIGGERS,
    asked,
    deadline,
    find_sources,
    process_age,
    rounds_between,
    save_file,
    seldom,
    stop_file,
)
from accelerate.ops import flight_recorder
from accelerate.settings.sections import StoppingSection


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_table() -> None:
    stops = {trigger.name: trigger.stops for trigger in TRIGGERS}
    assert stops == {
        "SIGTERM": True,
        "SIGUSR1": True,
        "SIGUSR2": False,
        "max_time": True,
        "allocation": True,
        "stop_file": True,
        "save_file": False,
        "preemption": False,
    }
    assert TRIGGERS[:3] == SIGNALS


def test_a_deadline_requests_a_stop_after_its_time() -> None:
    clock = Clock()
    source = deadline(TIME_IS_UP, 5.0, clock)
    assert not source.asks()
    clock.now = 5.0
    assert source.asks()


def test_a_stop_file_requests_a_stop_while_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    source = stop_file(str(path))
    assert not source.asks()
    path.touch()
    assert source.asks()
    assert source.asks()


def test_a_save_file_requests_one_save_for_each_touch(tmp_path: Path) -> None:
    path = tmp_path / "save"
    path.touch()
    source = save_file(str(path))
    assert not source.asks()
    os.utime(path, (1, 1))
    assert [source.asks(), source.asks()] == [True, False]
    path.unlink()
    assert not source.asks()
    path.touch()
    assert [source.asks(), source.asks()] == [True, False]


def test_slow_sources_are_read_less_often(tmp_path: Path) -> None:
    clock = Clock()
    source = seldom(stop_file(str(tmp_path)), clock)
    looks = []
    for clock.now in (0.0, 0.5, 1.0, 1.5):
        looks.append(source.asks())
    assert looks == [True, False, True, False]
    assert source.trigger is STOP_FILE


def test_nothing_is_watched_unless_asked_for() -> None:
    assert find_sources(StoppingSection(), {}, looks_at_files=True) == []


def test_the_time_budget_counts_from_the_start_of_the_process() -> None:
    settings = StoppingSection(max_time="00:01:00")
    assert asked(find_sources(settings, {}, looks_at_files=False, age=lambda: 50.0)) == set()
    assert asked(find_sources(settings, {}, looks_at_files=False, age=lambda: 61.0)) == {TIME_IS_UP}
    assert 0 <= process_age() < 3600


def test_a_wrong_time_budget_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ACCELERATE_MAX_TIME='soon'"):
        find_sources(StoppingSection(max_time="soon"), {}, looks_at_files=False)


@pytest.mark.parametrize(
    ("left", "margin", "expected"),
    [(100, None, True), (1000, None, False), (1000, 2000, True), (-5, 0, None)],
)
def test_the_end_of_an_allocation(left: int, margin: int | None, expected: bool | None) -> None:
    environ = {"SLURM_JOB_END_TIME": str(int(time.time()) + left)}
    sources = find_sources(StoppingSection(stop_margin=margin), environ, looks_at_files=False)
    if expected is None:
        assert sources == []
        return
    assert asked(sources) == ({ALLOCATION_ENDS} if expected else set())


def test_one_process_of_a_machine_looks_at_files(tmp_path: Path) -> None:
    settings = StoppingSection(stop_file=str(tmp_path), save_file=str(tmp_path / "save"))
    assert find_sources(settings, {}, looks_at_files=False) == []
    sources = find_sources(settings, {}, looks_at_files=True)
    assert [source.trigger for source in sources] == [STOP_FILE, SAVE_FILE]
    assert asked(sources) == {STOP_FILE}


def test_a_ray_worker_requests_one_stop_for_each_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    running = []

    def read() -> str | None:
        running.append(flight_recorder().running())
        return next(announced)

    announced = iter([None, "one node", "one node", "two nodes", "two nodes"])
    train = SimpleNamespace(get_preemption_info=read, get_context=object)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    sources = find_sources(StoppingSection(), {}, looks_at_files=False)
    assert [asked(sources) for _ in range(5)] == [set(), {PREEMPTION}, set(), {PREEMPTION}, set()]
    assert [entry and entry.operation for entry in running] == ["ray.train.get_preemption_info"] * 5
    assert flight_recorder().running() is None


@pytest.mark.parametrize("error", [RuntimeError, DeprecationWarning])
def test_outside_of_ray_workers_there_is_no_preemption_source(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def get_context() -> None:
        raise error("no worker")

    train = SimpleNamespace(get_preemption_info=get_context, get_context=get_context)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    assert find_sources(StoppingSection(), {}, looks_at_files=True) == []
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=object))  # an older release
    assert find_sources(StoppingSection(), {}, looks_at_files=True) == []


@pytest.mark.parametrize(
    ("step", "cost", "rounds"),
    [
        (0.0, 1.0, 1),  # not known yet
        (1.0, 1e-4, 1),
        (0.01, 0.85e-4, 9),  # 0.085 ms in 90 ms
        (0.001, 0.895e-4, 90),
        (1e-4, 1e-4, 200),  # no more than 200 steps apart
        (0.1, 0.05, 20),  # a dear exchange, but no more than 2 s apart
        (5.0, 1.0, 1),
    ],
)
def test_rounds_are_cheap_and_quick(step: float, cost: float, rounds: int) -> None:
    assert rounds_between(step, cost) == rounds
