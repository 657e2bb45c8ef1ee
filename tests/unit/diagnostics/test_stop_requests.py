"""When ranks run the collective for requests, and its results."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
import torch

from accelerate.diagnostics import get_stop_requests
from accelerate.diagnostics.stopping import (
    REQUEST_TYPES,
    SAVE_FILE,
    STOP_FILE,
    RequestType,
    SignalRecorder,
    StopRequests,
)
from accelerate.ops import AsyncReduction
from accelerate.state import PartialState

pytestmark = pytest.mark.usefixtures("states")


class Switch:
    """A source that is turned on and off by hand."""

    def __init__(self, kind: RequestType) -> None:
        self.kind = kind
        self.on = False

    def is_requested(self) -> bool:
        return self.on


class Collective:
    """A clock that advances by the step, and other ranks without requests."""

    def __init__(self, step: float = 0.01, cost: float = 1e-4) -> None:
        self.now, self.step, self.cost = 0.0, step, cost
        self.started_at: list[float] = []
        self.other: list[float] = [0.0] * len(REQUEST_TYPES)

    def __call__(self, numbers: Sequence[float], how: str, purpose: str) -> AsyncReduction:
        assert (how, len(numbers)) == ("max", len(REQUEST_TYPES) + 2)
        self.started_at.append(self.now)
        self.now += self.cost
        requests = [max(pair) for pair in zip(numbers, self.other, strict=False)]
        return AsyncReduction(torch.tensor([*requests, *numbers[-2:]], dtype=torch.float64))

    def agree(self, *sources: Switch) -> StopRequests:
        PartialState(cpu=True)
        return StopRequests(0, sources, SignalRecorder(), reduce=self, clock=lambda: self.now)


def steps(collective: Collective, stop_requests: StopRequests, number: int) -> list[tuple[bool, bool]]:
    found = []
    for _ in range(number):
        collective.now += collective.step
        found.append((stop_requests.read_save(), stop_requests.read_stop()))
    stop_requests.close()
    return found


def test_the_interval_of_collectives_depends_on_the_step_time() -> None:
    collective = Collective(step=0.01, cost=3.9e-5)
    steps(collective, collective.agree(), 100)
    gaps = [b - a for a, b in zip(collective.started_at, collective.started_at[1:], strict=False)]
    assert gaps[:2] == pytest.approx([0.010039] * 2)
    assert gaps[2] == pytest.approx(0.020039)  # the interval at most doubles
    assert gaps[3:] == pytest.approx([0.040039] * len(gaps[3:]))
    assert 20 <= len(collective.started_at) <= 30


def test_two_reads_in_a_step_do_not_delay_a_request() -> None:
    collective, switch = Collective(step=0.0), Switch(STOP_FILE)
    stop_requests = collective.agree(switch)
    for number in range(40):
        switch.on = number == 20
        collective.now += 1.5
        if stop_requests.read_stop() or stop_requests.read_stop():
            break
    stop_requests.close()
    assert 20 <= number <= 24


def test_long_steps_run_the_collective_at_each_step() -> None:
    collective = Collective(step=3.0, cost=0.1)
    steps(collective, collective.agree(), 10)
    assert len(collective.started_at) == 10


def test_a_request_to_stop_is_permanent_and_saves_once() -> None:
    collective, switch = Collective(step=3.0), Switch(STOP_FILE)
    stop_requests = collective.agree(switch)
    switch.on = True
    assert steps(collective, stop_requests, 4) == [(False, False), (True, True), (False, True), (False, True)]
    assert len(collective.started_at) == 1


def test_a_request_to_save_does_not_stop_the_run() -> None:
    collective, switch = Collective(step=3.0), Switch(SAVE_FILE)
    stop_requests = collective.agree(switch)
    switch.on = True
    assert stop_requests.read_save() is stop_requests.read_stop() is False
    switch.on = False
    assert steps(collective, stop_requests, 3) == [(True, False), (False, False), (False, False)]


def test_requests_to_another_rank_apply_to_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    collective = Collective(step=3.0)
    collective.other[0] = 4.0
    assert steps(collective, collective.agree(), 2) == [(False, False), (True, True)]
    assert "All ranks save and stop now: SIGTERM was sent to rank 3." in caplog.text


def test_save_and_stop_agree_within_a_step() -> None:
    """In either order, and also where one of them is read seldom."""
    for order in ("save stop", "stop save"):
        collective, switch = Collective(step=3.0), Switch(STOP_FILE)
        stop_requests = collective.agree(switch)
        switch.on = True
        read = {"save": stop_requests.read_save, "stop": stop_requests.read_stop}
        found = [[read[name]() for name in order.split()] for _ in range(2)]
        assert found == [[False, False], [True, True]]
        stop_requests.close()


@pytest.mark.parametrize("name", ["read_save", "read_stop"])
def test_reading_only_save_or_stop_is_enough(name: str) -> None:
    collective, switch = Collective(step=3.0), Switch(STOP_FILE)
    stop_requests = collective.agree(switch)
    switch.on = True
    read = getattr(stop_requests, name)
    assert [read(), read()] == [False, True]
    stop_requests.close()


def test_reading_save_once_does_not_delay_stop() -> None:
    collective, switch = Collective(step=3.0), Switch(STOP_FILE)
    stop_requests = collective.agree(switch)
    stop_requests.read_save()
    switch.on = True
    assert [stop_requests.read_stop() for _ in range(3)] == [False, False, True]
    stop_requests.close()


def test_the_first_read_sets_handlers_and_close_restores_them() -> None:
    before = signal.getsignal(signal.SIGTERM)
    collective = Collective()
    stop_requests = collective.agree()
    assert signal.getsignal(signal.SIGTERM) == before
    stop_requests.read_stop()
    assert signal.getsignal(signal.SIGTERM) != before
    stop_requests.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert [stop_requests.read_stop() for _ in range(5)] == [False] * 5
    assert len(collective.started_at) == 1


def test_a_run_has_one_agreement_until_its_state_is_reset() -> None:
    before = signal.getsignal(signal.SIGTERM)
    PartialState(cpu=True)
    stop_requests = get_stop_requests({})
    assert get_stop_requests({}) is stop_requests
    stop_requests.read_stop()
    signal.raise_signal(signal.SIGTERM)
    assert stop_requests.read_save() is False  # the same step
    while not stop_requests.read_save():
        continue
    assert stop_requests.read_stop()
    PartialState._reset_state()  # `stop_requests` is still held, as by an `Accelerator` in a reference cycle
    assert signal.getsignal(signal.SIGTERM) == before
