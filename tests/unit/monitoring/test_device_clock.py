"""Times of a simulated device that runs behind the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import example, given, settings, strategies as st

from accelerate.monitoring import BACKWARD, DATA, FORWARD, PHASES, SAVING, StepClock, device_clock
from accelerate.monitoring.step_clock import COLLECTIVES

from .clocked import Loader, step

MODULE = "accelerate.monitoring.step_clock"


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.done = 0.0

    def query(self) -> bool:
        assert not self.device.captures
        return self.device.now >= self.done


class Device:
    """A host and the one stream of its device, with the time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free = 0.0  # when the stream has done all
        self.num_events = self.num_records = 0
        self.captures = False
        self.has_times = self.has_events = True

    def host(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float, host: float = 1e-4) -> None:
        """Launch a kernel of so many seconds."""
        self.now += host
        self.free = max(self.free, self.now) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.free)

    def make(self) -> Event | None:
        self.num_events += 1
        return Event(self) if self.has_events else None

    def record(self, event: Event) -> None:
        self.num_records += 1
        event.done = max(self.free, self.now)

    def seconds_between(self, first: Event, last: Event) -> float | None:
        assert last.query()
        return last.done - first.done if self.has_times else None

    def is_capturing(self) -> bool:
        return self.captures


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return follow_time(monkeypatch)


def follow_time(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(f"{MODULE}.perf_counter", lambda: device.now)
    return device


def make_clock(device: Device) -> StepClock:
    clock = StepClock()
    clock.follow_device(device)
    return clock


def run_step(
    clock: StepClock,
    device: Device,
    number: int,
    forward: float,
    backward: float = 0.1,
    host: float = 1e-4,
    in_forward: Callable[[], None] = lambda: None,
    optimizer: float = 0.05,
) -> None:
    """Run one step of optimizer 7; `host` is what the host takes to launch each kernel."""
    clock.switch(DATA)
    device.host(1e-4)
    clock.batch_read(4)
    device.launch(forward, host)
    in_forward()
    clock.before_backward(None, {})
    device.launch(backward, host)
    clock.after_backward()
    device.host(1e-4)
    with step(clock, 7, number):
        device.launch(optimizer, host)
    device.host(1e-4)


def read(clock: StepClock, device: Device) -> dict[str, float]:
    """The shares, after all events are done."""
    clock.times()
    device.wait()
    times = clock.times()
    assert sum(times.seconds_by.values()) == pytest.approx(times.seconds)
    assert min(times.seconds_by.values()) >= 0
    return times.shares


@pytest.mark.parametrize("waits", [False, True])
def test_a_phase_takes_the_time_of_its_kernels(device: Device, waits: bool) -> None:
    clock = make_clock(device)
    for number in range(1, 11):
        run_step(clock, device, number, forward=0.35)
        if waits:
            device.wait()
    shares = read(clock, device)
    expected = {"forward": 0.7, "backward": 0.2, "optimizer": 0.1}
    assert shares == pytest.approx(shares | expected, abs=0.01)
    assert clock.times().seconds == pytest.approx(5.0, rel=0.01)
    assert clock.idle == 0.0


def test_without_events_the_times_are_those_of_the_host(device: Device) -> None:
    clock = StepClock()
    clock.follow_device(None)
    for number in range(1, 11):
        run_step(clock, device, number, forward=0.35)
        device.wait()
    assert clock.times().shares["forward"] < 0.01


@pytest.mark.parametrize("missing", ["has_times", "has_events"])
def test_a_device_without_times_keeps_those_of_the_host(device: Device, missing: str) -> None:
    setattr(device, missing, False)
    clock = make_clock(device)
    for number in range(1, 11):
        run_step(clock, device, number, forward=0.35)
        device.wait()
    records = device.num_records
    shares = read(clock, device)
    assert shares["rest"] > 0.9
    assert device.num_records == records < 20


def test_each_window_has_the_shares_of_the_device(device: Device) -> None:
    clock = make_clock(device)
    for number in range(1, 81):
        run_step(clock, device, number, forward=0.35)
        if device.free - device.now > 1.2:  # the host is two steps ahead, as far as it can be
            device.host(device.free - device.now - 1.2)
    clock.end_run()
    windows = list(clock.windows)[3:]
    assert len(windows) > 10
    for window in windows:
        assert min(window.times.seconds_by.values()) >= 0
        assert sum(window.times.seconds_by.values()) == pytest.approx(window.times.seconds)
        assert window.times.shares["forward"] == pytest.approx(0.7, abs=0.05)


def test_the_end_of_a_backward_pass_waits_on_the_device(device: Device) -> None:
    clock = make_clock(device)
    clock.switch(DATA)
    clock.before_backward(None, {})
    device.launch(0.2)
    clock.end_gradients()
    device.launch(0.6)  # the stream waits for that of the collectives
    clock.after_backward()
    shares = read(clock, device)
    assert shares["collectives"] == pytest.approx(0.75, abs=0.01)
    assert shares["backward"] == pytest.approx(0.25, abs=0.01)


def test_saves_keep_the_time_of_the_host(device: Device) -> None:
    clock = make_clock(device)
    clock.switch(DATA)
    device.launch(1.0)
    with clock.phase(SAVING):
        device.wait()
        device.host(1.0)
    assert clock.times().seconds_by["saving"] == pytest.approx(2.0, rel=0.01)


def test_a_device_that_waits_for_the_host_is_idle(device: Device) -> None:
    clock = make_clock(device)
    for number in range(1, 21):
        run_step(clock, device, number, forward=1e-5, backward=1e-5, optimizer=1e-5, host=0.02)
        device.host(0.001)
    read(clock, device)
    assert clock.idle > 0.5


def test_a_host_that_waits_in_the_forward_pass_leaves_no_device_idle(device: Device) -> None:
    clock = make_clock(device)
    for number in range(1, 21):
        run_step(clock, device, number, forward=0.35, backward=0.02, in_forward=device.wait)
        device.wait()
    read(clock, device)
    assert clock.idle == 0.0


def test_a_loader_that_is_slow_is_no_idle_device(device: Device) -> None:
    clock = make_clock(device)
    for number in range(1, 21):
        clock.switch(DATA)
        device.host(1.0)
        run_step(clock, device, number, forward=0.35)
    assert read(clock, device)["data"] > 0.4
    assert clock.idle == 0.0


def test_events_are_used_again(device: Device) -> None:
    clock = make_clock(device)
    for number in range(1, 11):
        run_step(clock, device, number, forward=0.35)
        device.wait()
    made = device.num_events
    for number in range(11, 31):
        run_step(clock, device, number, forward=0.35)
        device.wait()
    assert device.num_events == made < 40
    assert device.num_records > 100


def test_a_device_that_is_far_behind_has_a_bounded_number_of_events(device: Device) -> None:
    clock = make_clock(device)
    for number in range(1, 301):
        run_step(clock, device, number, forward=0.35, host=0.1)
        device.launch(10.0)
    assert device.num_events == device_clock.MAX_EVENTS
    clock.times()
    device.wait()
    clock.times()
    records = device.num_records
    for number in range(301, 311):
        run_step(clock, device, number, forward=0.35)
        device.wait()
    assert device.num_events == device_clock.MAX_EVENTS
    assert device.num_records >= records + 10 * 5
    times = clock.times()
    assert sum(times.seconds_by.values()) == pytest.approx(times.seconds)


def test_rounds_that_accumulate_are_read_before_their_step(device: Device) -> None:
    clock = make_clock(device)
    for _ in range(200):
        clock.switch(DATA)
        clock.batch_read(4)
        device.launch(0.3)
        clock.before_backward(None, {})
        device.launch(0.1)
        clock.after_backward()
        device.wait()
    assert device.num_events < 20
    assert read(clock, device)["forward"] == pytest.approx(0.75, abs=0.01)


def test_a_stream_that_captures_a_graph_records_no_events(device: Device) -> None:
    clock = make_clock(device)
    run_step(clock, device, 1, forward=0.35)
    records = device.num_records
    device.captures = True
    run_step(clock, device, 2, forward=0.35)
    assert device.num_records == records
    device.captures = False
    for number in range(3, 13):
        run_step(clock, device, number, forward=0.35)
    assert read(clock, device)["forward"] == pytest.approx(0.7, abs=0.05)


def test_an_evaluation_after_training_has_no_backward_pass(device: Device) -> None:
    clock = make_clock(device)
    for number in range(1, 11):
        run_step(clock, device, number, forward=0.35)
    backward = 10 * 0.1
    clock.pass_begun(begin := Loader())
    for _ in range(20):
        device.host(1e-4)
        clock.batch_read(4)
        device.launch(1.0)
        device.wait()
        clock.switch(DATA)
    clock.pass_ended(begin)
    clock.times()
    device.wait()
    assert clock.times().seconds_by["backward"] == pytest.approx(backward, rel=0.02)
    assert clock.times().seconds_by["forward"] == pytest.approx(20 + 3.5, rel=0.02)


NAMES = ["data", "forward", "backward", "collectives", "step", "save", "pass", "read", "wait"]
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0.0, 2.0), st.floats(0.0, 2.0)), max_size=60)


@example([("data", 1.0, 1.0), ("pass", 0.0, 0.0)])  # nothing was read when the pass began
@given(CALLS)
@settings(max_examples=100)
def test_the_phases_always_add_up_to_the_time_of_the_host(calls: list[tuple[str, float, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = follow_time(patch)
        clock = make_clock(device)
        clock.switch(DATA)
        began, number = device.now, 0
        phases = {"data": DATA, "forward": FORWARD, "backward": BACKWARD, "collectives": COLLECTIVES}
        for name, host, kernel in calls:
            if name in phases:
                clock.switch(phases[name])
            if name == "pass":
                clock.pass_begun(Loader())
            number += name == "step"
            with step(clock, 7, number) if name == "step" else nullcontext():
                device.launch(kernel, host)
            if name == "save":
                with clock.phase(SAVING):
                    device.launch(kernel, host)
            if name == "wait":
                device.wait()
            if name == "read":
                clock.times()
        times = clock.times()
        assert sum(times.seconds_by.values()) == pytest.approx(device.now - began, abs=1e-6)
        assert min(times.seconds_by.values()) >= 0
        assert times.seconds_by.keys() == set(PHASES)
