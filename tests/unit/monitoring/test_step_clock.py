"""Phases of steps, steps of several optimizers, windows and other threads in the step clock."""

from __future__ import annotations

import threading

import pytest

from accelerate.monitoring import DATA, FORWARD, SAVING, StepClock, step_clock

from .clocked import Loader, take_step

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
    """Runs one step of optimizer 7."""
    clock.switch(DATA)
    time.now += data
    clock.batch_read(4)
    time.now += forward
    clock.before_backward(None, {})
    time.now += backward
    clock.after_backward()
    take_step(clock, 7, number)


def test_phases_add_up_and_an_inner_phase_is_no_part_of_the_outer_one(time: Time) -> None:
    clock = StepClock()
    time.now += 50.0  # before the first batch
    clock.switch(DATA)
    time.now += 1.0
    clock.batch_read(8)
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
    clock.before_backward(None, {})
    time.now += 3.0
    clock.end_gradients()
    time.now += 2.0
    clock.after_backward()
    times = clock.times()
    assert (times.seconds_by["backward"], times.seconds_by["collectives"]) == (3.0, 2.0)


def test_steps_of_several_optimizers_are_one_step(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 4):
        time.now += 1.0
        for optimizer in (7, 8):
            take_step(clock, optimizer, number)
    assert clock.times().steps == 3


def test_a_step_that_is_left_out_is_not_counted(time: Time) -> None:
    clock = StepClock()
    take_step(clock, 7, 1)
    take_step(clock, 7, 1, updates=0)
    assert clock.times().steps == 1


def test_numbers_that_a_checkpoint_has_changed_are_no_steps(time: Time) -> None:
    clock = StepClock()
    take_step(clock, 7, 1)
    clock.restart_numbers()
    take_step(clock, 7, 501)
    assert clock.times().steps == 2


def test_a_window_ends_after_its_interval_with_the_values_of_its_last_step(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 27):
        if clock.wanted:
            clock.kept["loss"] = number
        run_step(clock, time, number, data=0.05, forward=0.02, backward=0.03)
    begin, first, second = clock.windows
    assert (begin.last, begin.times.steps) == (1, 1)  # the first step, for a failure soon after it
    assert first.last == first.values["loss"]
    assert 1 + first.times.steps + second.times.steps == second.last
    assert first.times.seconds == pytest.approx(first.times.steps * 0.1)
    assert first.times.shares == pytest.approx({**first.times.shares, "data": 0.5, "backward": 0.3})
    assert clock.times().window == second.times


def test_each_step_that_is_longer_than_the_interval_is_a_window(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 11):
        run_step(clock, time, number, data=1.0, forward=1.0, backward=1.0)
    assert [window.times.steps for window in clock.windows] == [1] * 10


def test_windows_grow_with_the_run(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "MAX_WINDOWS", 10)
    clock = StepClock()
    for number in range(1, 2001):
        run_step(clock, time, number, data=0.05, forward=0.02, backward=0.03)
    assert len(clock.windows) < 45
    assert clock.windows[-1].times.seconds > 10


def test_saves_between_short_steps_are_counted_in_full(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 2001):
        run_step(clock, time, number, data=20e-6, forward=30e-6, backward=50e-6)
        if number % 500 == 0:
            with clock.phase(SAVING):
                time.now += 0.25
    assert clock.times().seconds_by["saving"] == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [1, 2, 100])
def test_no_step_of_a_second_stage_is_lost(time: Time, steps: int) -> None:
    clock = StepClock()
    for optimizer, count in ((7, 3), (8, 1 + steps)):
        for number in range(1, count + 1):
            time.now += 1.0
            take_step(clock, optimizer, number)
    assert clock.times().steps == clock.number == 3 + 1 + steps


def test_an_optimizer_that_steps_more_often_counts_the_steps(time: Time) -> None:
    clock = StepClock()
    for number in range(1, 101):
        take_step(clock, 7, number)
        for update in (2 * number - 1, 2 * number):
            take_step(clock, 8, update)
    assert 200 <= clock.times().steps <= 201


def test_waits_are_those_of_training_without_first_batches(time: Time) -> None:
    clock = StepClock()
    number = 0
    for waits, trains in (((50.0, 0.5, 0.25), True), ((9.0, 9.0), False), ((70.0, 0.25), True)):
        clock.pass_begun(begin := Loader(0))
        for wait in waits:
            time.now += wait
            clock.batch_read(4)
            time.now += 1.0
            if trains:
                number += 1
                take_step(clock, 7, number)
            clock.switch(DATA)
        clock.pass_ended(begin)
    times = clock.times()
    assert times.waits == pytest.approx(1.0)
    assert times.evaluation == pytest.approx(20.0)
    assert times.seconds_by["data"] == pytest.approx(50.0 + 0.75 + 18.0 + 70.25)


def test_the_first_batch_of_each_worker_is_no_wait(time: Time) -> None:
    clock = StepClock()
    clock.pass_begun(begin := Loader(3))
    for number, wait in enumerate((9.0, 8.0, 7.0, 0.5, 0.25), 1):
        time.now += wait
        clock.batch_read(4)
        take_step(clock, 7, number)
        clock.switch(DATA)
    clock.pass_ended(begin)
    assert clock.times().waits == 0.75


def test_an_evaluation_inside_of_a_pass_is_no_wait_of_training(time: Time) -> None:
    clock = StepClock()
    clock.pass_begun(begin := Loader(0))
    for number in range(1, 11):
        time.now += 0.1
        clock.batch_read(4)
        take_step(clock, 7, number)
        if number == 5:
            clock.pass_begun(inner := Loader(0))
            for _ in range(3):
                time.now += 5.0
                clock.batch_read(4)
                clock.switch(DATA)
            time.now += 5.0
            clock.pass_ended(inner)
        clock.switch(DATA)
    clock.pass_ended(begin)
    assert clock.times().waits == pytest.approx(0.9)
    assert clock.times().evaluation == pytest.approx(20.0)


def test_training_in_another_thread_is_counted(time: Time) -> None:
    clock = StepClock()

    def train() -> None:
        for number in range(1, 11):
            run_step(clock, time, number, data=0.1, forward=0.2, backward=0.3)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    clock.end_run()
    times = clock.times()
    assert times.steps == 10
    assert times.seconds_by["backward"] == pytest.approx(9 * 0.3)
    assert sum(window.times.steps for window in clock.windows) == 10


def test_a_second_thread_that_trains_at_the_same_time_is_not_counted(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 1, data=0.1, forward=0.2, backward=0.3)

    def train(optimizer: int) -> None:
        for number in range(1, 11):
            take_step(clock, optimizer, number)

    for optimizer, expected in ((8, 1), (7, 11)):
        thread = threading.Thread(target=train, args=(optimizer,))
        thread.start()
        thread.join()
        assert clock.times().steps == expected


def test_phases_of_threads_that_do_not_train_have_no_effect(time: Time) -> None:
    clock = StepClock()
    clock.switch(DATA)
    time.now += 1.0

    def call() -> None:
        clock.pass_begun(begin := Loader(0))
        clock.batch_read(4)
        clock.before_backward(None, {})
        time.now += 1.0
        clock.after_backward()
        clock.pass_ended(begin)

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


def test_items_and_flops_belong_to_the_window_of_their_steps(time: Time) -> None:
    clock = StepClock()
    for number in (1, 2, 3, 4):
        clock.items += 10
        run_step(clock, time, number, data=0.0, forward=1.0, backward=1.0)
    clock.step_flops, clock.peak_flops = 6.0, 12.0
    times = clock.times()
    assert (times.items, times.items_per_second) == (40, 5)
    assert (times.flops_per_second, times.mfu) == (3, 0.25)
    clock.items += 7
    run_step(clock, time, 5, data=0.0, forward=1.0, backward=0.0)
    window = clock.times().window
    assert (window.steps, window.items, window.flops_per_second, window.mfu) == (1, 7, 6, 0.5)


def test_skipped_steps_are_counted_apart(time: Time) -> None:
    clock = StepClock()
    take_step(clock, 7, 0, updates=0)
    take_step(clock, 7, 1)
    assert (clock.steps, clock.num_skipped) == (1, 1)
