"""When ranks run the collective for requests, and its results."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
import torch

from accelerate.diagnostics import (
    SAVE_FILE,
    STOP_FILE,
    TRIGGERS,
    Agreement,
    SignalNotes,
    Trigger,
    agreement_of_run,
)
from accelerate.ops import Answer
from accelerate.state import PartialState

pytestmark = pytest.mark.usefixtures("states")


class Switch:
    """A source that is turned on and off by hand."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger
        self.on = False

    def asks(self) -> bool:
        return self.on


class Collective:
    """A clock that advances by the step, and other ranks without requests."""

    def __init__(self, step: float = 0.01, cost: float = 1e-4) -> None:
        self.now, self.step, self.cost = 0.0, step, cost
        self.asked_at: list[float] = []
        self.other: list[float] = [0.0] * len(TRIGGERS)

    def __call__(self, numbers: Sequence[float], how: str, purpose: str) -> Answer:
        assert (how, len(numbers)) == ("max", len(TRIGGERS) + 2)
        self.asked_at.append(self.now)
        self.now += self.cost
        requests = [max(pair) for pair in zip(numbers, self.other, strict=False)]
        return Answer(torch.tensor([*requests, *numbers[-2:]], dtype=torch.float64))

    def agree(self, *sources: Switch) -> Agreement:
        PartialState(cpu=True)
        return Agreement(0, sources, SignalNotes(), combine=self, clock=lambda: self.now)


def steps(collective: Collective, agreement: Agreement, number: int) -> list[tuple[bool, bool]]:
    found = []
    for _ in range(number):
        collective.now += collective.step
        found.append((agreement.read_save(), agreement.read_stop()))
    agreement.close()
    return found


def test_the_interval_of_collectives_depends_on_the_step_time() -> None:
    collective = Collective(step=0.01, cost=3.9e-5)
    steps(collective, collective.agree(), 100)
    gaps = [b - a for a, b in zip(collective.asked_at, collective.asked_at[1:], strict=False)]
    assert gaps[:2] == pytest.approx([0.010039] * 2)
    assert gaps[3:] == pytest.approx([0.040039] * len(gaps[3:]))
    assert 20 <= len(collective.asked_at) <= 30


def test_long_steps_run_the_collective_at_each_step() -> None:
    collective = Collective(step=3.0, cost=0.1)
    steps(collective, collective.agree(), 10)
    assert len(collective.asked_at) == 10


def test_a_request_to_stop_is_permanent_and_saves_once() -> None:
    collective, switch = Collective(step=3.0), Switch(STOP_FILE)
    agreement = collective.agree(switch)
    switch.on = True
    assert steps(collective, agreement, 4) == [(False, False), (True, True), (False, True), (False, True)]
    assert len(collective.asked_at) == 1


def test_a_request_to_save_does_not_stop_the_run() -> None:
    collective, switch = Collective(step=3.0), Switch(SAVE_FILE)
    agreement = collective.agree(switch)
    switch.on = True
    assert agreement.read_save() is agreement.read_stop() is False
    switch.on = False
    assert steps(collective, agreement, 3) == [(True, False), (False, False), (False, False)]


def test_requests_to_another_rank_apply_to_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    collective = Collective(step=3.0)
    collective.other[0] = 4.0
    assert steps(collective, collective.agree(), 2) == [(False, False), (True, True)]
    assert "All processes save and stop now: SIGTERM reached process 3." in caplog.text


def test_save_and_stop_agree_within_a_step() -> None:
    """In either order, and also where one of them is read seldom."""
    for order in ("save stop", "stop save"):
        collective, switch = Collective(step=3.0), Switch(STOP_FILE)
        agreement = collective.agree(switch)
        switch.on = True
        read = {"save": agreement.read_save, "stop": agreement.read_stop}
        found = [[read[name]() for name in order.split()] for _ in range(2)]
        assert found == [[False, False], [True, True]]
        agreement.close()


@pytest.mark.parametrize("name", ["read_save", "read_stop"])
def test_reading_only_save_or_stop_is_enough(name: str) -> None:
    collective, switch = Collective(step=3.0), Switch(STOP_FILE)
    agreement = collective.agree(switch)
    switch.on = True
    read = getattr(agreement, name)
    assert [read(), read()] == [False, True]
    agreement.close()


def test_reading_save_once_does_not_delay_stop() -> None:
    collective, switch = Collective(step=3.0), Switch(STOP_FILE)
    agreement = collective.agree(switch)
    agreement.read_save()
    switch.on = True
    assert [agreement.read_stop() for _ in range(3)] == [False, False, True]
    agreement.close()


def test_the_first_read_sets_handlers_and_close_restores_them() -> None:
    before = signal.getsignal(signal.SIGTERM)
    collective = Collective()
    agreement = collective.agree()
    assert signal.getsignal(signal.SIGTERM) == before
    agreement.read_stop()
    assert signal.getsignal(signal.SIGTERM) != before
    agreement.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert [agreement.read_stop() for _ in range(5)] == [False] * 5
    assert len(collective.asked_at) == 1


def test_a_run_has_one_agreement_until_its_state_is_reset() -> None:
    before = signal.getsignal(signal.SIGTERM)
    PartialState(cpu=True)
    agreement = agreement_of_run({})
    assert agreement_of_run({}) is agreement
    agreement.read_stop()
    signal.raise_signal(signal.SIGTERM)
    assert agreement.read_save() is False  # the same step
    while not agreement.read_save():
        continue
    assert agreement.read_stop()
    PartialState._reset_state()  # `agreement` is still held, as by an `Accelerator` in a reference cycle
    assert signal.getsignal(signal.SIGTERM) == before
