"""The clock of the phases of a step: nested phases, steps of several optimizers, windows, other threads."""

from __future__ import annotations

import threading

import pytest

from accelerate.monitoring import BACKWARD, DATA, FORWARD, OPTIMIZER, SAVING, StepClock, step_clock

MODULE = "accelerate.monitoring.step_clock"


class Time:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(f"{MODULE}.perf_counter", time)
    return time


def run_step(clock: StepClock, time: Time, number: int, data: float, forward: float, backward: float) -> None:
    """Run one step of optimizer 7, if it is measured with all phases."""
    if clock.active:
        clock.switch(DATA)
    time.now += data
    if clock.active:
        clock.begin_forward(4)
    time.now += forward
    if clock.active:
        before = clock.switch(BACKWARD)
    time.now += backward
    if clock.active:
        clock.end_backward(before, 0.0)
    if number - 1 >= clock.measured_from:
        clock.end_step(clock.begin_step(7), 7, 1, number)


def test_phases_add_up_and_an_inner_phase_is_no_part_of_the_outer_one(time: Time) -> None:
    clock = StepClock()
    time.now += 50.0  # before the first batch
    clock.switch(DATA)
    time.now += 1.0
    clock.begin_forward(8)
    time.now += 2.0
    before = clock.wait_for_ranks()
    time.now += 0.5
    clock.resume(before)
    time.now += 1.0
    times = clock.times()
    assert times.seconds == 4.5
    assert {name: seconds for name, seconds in times.seconds_by.items() if seconds} == {
        "data": 1.0,
        "forward": 3.0,
        "collectives": 0.5,
    }
    assert times.samples == 8
    assert times.shares["forward"] == pytest.approx(3.0 / 4.5)


def test_collectives_inside_of_saves_and_reads_belong_to_these(time: Time) -> None:
    clock = StepClock()
    clock.switch(DATA)
    for phase in (DATA, SAVING):
        clock.switch(phase)
        before = clock.wait_for_ranks()
        time.now += 1.0
        clock.resume(before)
    assert clock.times().seconds_by["collectives"] == 0.0
    assert clock.times().seconds_by["saving"] == clock.times().seconds_by["data"] == 1.0


def test_what_follows_the_last_gradient_of_a_backward_pass_is_a_collective(time: Time) -> None:
    clock = StepClock()
    before = clock.switch(BACKWARD)
    time.now += 3.0
    computed = time.now
    time.now += 2.0
    clock.end_backward(before, computed)
    times = clock.times()
    assert (times.seconds_by["backward"], times.seconds_by["collectives"]) == (3.0, 2.0)


def test_steps_of_several_optimizers_are_one_step(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 4):
        time.now += 1.0
        for optimizer in (7, 8):
            clock.end_step(clock.switch(OPTIMIZER), optimizer, 1, number)
    assert clock.times().steps == 3


def test_a_step_that_is_left_out_is_not_counted(time: Time) -> None:
    clock = StepClock()
    clock.end_step(clock.switch(OPTIMIZER), 7, 1, 1)
    clock.end_step(clock.switch(OPTIMIZER), 7, 0, 1)
    assert clock.times().steps == 1


def test_steps_are_counted_by_another_optimizer_when_the_first_one_is_given_up(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 4):
        clock.end_step(clock.switch(OPTIMIZER), 7, 1, number)
    for number in range(1, 101):
        clock.end_step(clock.switch(OPTIMIZER), 8, 1, number)
    assert 3 + 30 <= clock.times().steps <= 3 + 100


def test_numbers_that_a_checkpoint_has_changed_are_no_steps(time: Time) -> None:
    clock = StepClock()
    clock.end_step(clock.switch(OPTIMIZER), 7, 1, 1)
    clock.follow_anew()
    clock.end_step(clock.switch(OPTIMIZER), 7, 1, 501)
    assert clock.times().steps == 2


def test_a_window_ends_after_its_interval_with_the_values_of_its_last_step(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 27):
        if clock.wanted:
            clock.kept["loss"] = number
        run_step(clock, time, number, data=0.05, forward=0.02, backward=0.03)
    first, second = clock.windows
    assert first.last == first.values["loss"]
    assert first.times.steps + second.times.steps == second.last
    assert first.times.seconds == pytest.approx(first.times.steps * 0.1)
    assert first.times.shares == pytest.approx({**first.times.shares, "data": 0.5, "backward": 0.3})
    assert clock.times().window == second.times


def test_each_step_that_is_longer_than_the_interval_is_a_window(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 11):
        run_step(clock, time, number, data=1.0, forward=1.0, backward=1.0)
    assert [window.times.steps for window in clock.windows][1:] == [1] * 7


def test_windows_grow_with_the_run(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "MOST_WINDOWS", 10)
    clock = StepClock()
    for number in range(1, 2001):
        run_step(clock, time, number, data=0.05, forward=0.02, backward=0.03)
    assert len(clock.windows) < 45
    assert clock.windows[-1].times.seconds > 10


def test_of_short_steps_some_are_measured_and_the_others_divided_like_them(time: Time) -> None:
    clock = StepClock()
    measured = 0
    for number in range(1, 40_001):
        measured += clock.active
        run_step(clock, time, number, data=20e-6, forward=30e-6, backward=50e-6)
    times = clock.times({7: 40_000})
    assert 40 < measured < 1000
    assert times.steps == 40_000
    assert times.seconds == pytest.approx(4.0)
    shares = {"data": 0.2, "forward": 0.3, "backward": 0.5}
    assert times.shares == pytest.approx(times.shares | shares, abs=1e-6)


def test_saves_between_short_steps_are_counted_in_full(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 2001):
        run_step(clock, time, number, data=20e-6, forward=30e-6, backward=50e-6)
        if number % 500 == 0:
            with clock.phase(SAVING):
                time.now += 0.25
    assert clock.times().seconds_by["saving"] == pytest.approx(1.0)


def test_short_batches_of_an_evaluation_are_measured_at_first_only(time: Time) -> None:
    clock = StepClock()
    calls = 0
    clock.begin_pass()
    for _ in range(1000):
        time.now += 20e-6
        if clock.active:
            calls += 1
            clock.begin_forward(4)
        time.now += 60e-6
        if clock.active:
            clock.switch(DATA)
    clock.end_pass(0)
    assert calls == step_clock.MEASURED_BATCHES
    assert clock.active
    assert clock.times().seconds == pytest.approx(0.08)
    assert clock.times().shares["forward"] == pytest.approx(0.75, abs=0.02)


def test_calls_from_other_threads_change_nothing(time: Time) -> None:
    clock = StepClock()
    clock.switch(DATA)
    time.now += 1.0

    def call() -> None:
        clock.begin_pass()
        clock.begin_forward(4)
        before = clock.switch(BACKWARD)
        time.now += 1.0
        clock.end_backward(before, 0.0)
        clock.end_step(clock.begin_step(7), 7, 1, 1)
        clock.end_pass(4)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert clock.current == DATA
    assert clock.times().seconds_by["data"] == clock.times().seconds == 2.0
    assert clock.times().steps == clock.times().samples == 0


def test_a_reset_starts_again(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 1, data=1.0, forward=1.0, backward=1.0)
    clock.reset()
    time.now += 5.0
    assert clock.times().seconds == 0.0
    assert clock.times().steps == 0
    clock.switch(FORWARD)
    time.now += 1.0
    assert clock.times().seconds_by["forward"] == clock.times().seconds == 1.0
