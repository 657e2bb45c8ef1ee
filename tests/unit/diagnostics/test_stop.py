"""Sources of requests to stop or to save."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerate.base import ConfigurationError
from accelerate.diagnostics.stopping import (
    ALLOCATION_ENDS,
    PREEMPTION,
    REQUEST_TYPES,
    SAVE_FILE,
    SIGNALS,
    STOP_FILE,
    TIME_IS_UP,
    deadline,
    find_sources,
    process_age,
    read_requests,
    save_file,
    steps_between,
    stop_file,
    throttled,
)
from accelerate.ops import flight_recorder
from accelerate.settings.sections import StoppingSection


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_request_stops_or_only_saves() -> None:
    stops = {kind.name: kind.stops for kind in REQUEST_TYPES}
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
    assert REQUEST_TYPES[:3] == SIGNALS


def test_a_deadline_requests_a_stop_after_its_time() -> None:
    clock = Clock()
    source = deadline(TIME_IS_UP, 5.0, clock)
    assert not source.is_requested()
    clock.now = 5.0
    assert source.is_requested()


def test_a_stop_file_requests_a_stop_while_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    source = stop_file(str(path))
    assert not source.is_requested()
    path.touch()
    assert source.is_requested()
    assert source.is_requested()


def test_a_save_file_requests_one_save_for_each_touch(tmp_path: Path) -> None:
    path = tmp_path / "save"
    path.touch()
    source = save_file(str(path))
    assert not source.is_requested()
    os.utime(path, (1, 1))
    assert [source.is_requested(), source.is_requested()] == [True, False]
    path.unlink()
    assert not source.is_requested()
    path.touch()
    assert [source.is_requested(), source.is_requested()] == [True, False]


def test_slow_sources_are_read_less_often(tmp_path: Path) -> None:
    clock = Clock()
    source = throttled(stop_file(str(tmp_path)), clock)
    looks = []
    for clock.now in (0.0, 0.5, 1.0, 1.5):
        looks.append(source.is_requested())
    assert looks == [True, False, True, False]
    assert source.kind is STOP_FILE


def test_the_time_budget_counts_from_the_start_of_the_process() -> None:
    settings = StoppingSection(max_time="00:01:00")
    assert read_requests(find_sources(settings, {}, reads_files=False, age=lambda: 50.0)) == set()
    assert read_requests(find_sources(settings, {}, reads_files=False, age=lambda: 61.0)) == {TIME_IS_UP}
    assert 0 <= process_age() < 3600


def test_a_wrong_time_budget_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ACCELERATE_MAX_TIME='soon'"):
        find_sources(StoppingSection(max_time="soon"), {}, reads_files=False)


@pytest.mark.parametrize(
    ("left", "margin", "expected"),
    [(100, None, True), (1000, None, False), (1000, 2000, True), (-5, 0, None)],
)
def test_the_end_of_an_allocation(left: int, margin: int | None, expected: bool | None) -> None:
    environ = {"SLURM_JOB_END_TIME": str(int(time.time()) + left)}
    sources = find_sources(StoppingSection(stop_margin=margin), environ, reads_files=False)
    if expected is None:
        assert sources == []
        return
    assert read_requests(sources) == ({ALLOCATION_ENDS} if expected else set())


def test_one_process_of_a_machine_reads_files(tmp_path: Path) -> None:
    settings = StoppingSection(stop_file=str(tmp_path), save_file=str(tmp_path / "save"))
    assert find_sources(settings, {}, reads_files=False) == []
    sources = find_sources(settings, {}, reads_files=True)
    assert [source.kind for source in sources] == [STOP_FILE, SAVE_FILE]
    assert read_requests(sources) == {STOP_FILE}


def test_a_ray_worker_requests_one_stop_for_each_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    running = []

    def read() -> str | None:
        running.append(flight_recorder().running())
        return next(announced)

    announced = iter([None, "one node", "one node", "two nodes", "two nodes"])
    train = SimpleNamespace(get_preemption_info=read, get_context=object)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    sources = find_sources(StoppingSection(), {}, reads_files=False)
    assert [read_requests(sources) for _ in range(5)] == [set(), {PREEMPTION}, set(), {PREEMPTION}, set()]
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
    assert find_sources(StoppingSection(), {}, reads_files=True) == []
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=object))  # an older release
    assert find_sources(StoppingSection(), {}, reads_files=True) == []


@pytest.mark.parametrize(
    ("step", "cost", "num_steps"),
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
def test_the_number_of_steps_is_cheap_and_quick(step: float, cost: float, num_steps: int) -> None:
    assert steps_between(step, cost) == num_steps
