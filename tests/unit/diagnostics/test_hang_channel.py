"""What ranks tell each other over a store."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from accelerate.diagnostics import COLLECTIVE, ELSEWHERE, HangChannel, Identity, RankState, Report
from accelerate.state import StoreChannel

Pair = tuple[HangChannel, HangChannel]


@pytest.fixture
def pair() -> Pair:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    return HangChannel(StoreChannel(store, "", {}), 0), HangChannel(StoreChannel(store, "", {}), 1)


def test_one_of_two_that_ask_at_the_same_time_is_the_first(pair: Pair) -> None:
    first, second = pair
    assert first.inquiry() == 0
    assert [first.ask(0), second.ask(0)] == [True, False]
    assert second.inquiry() == 1
    assert second.ask(1)


def test_states_and_reports_arrive_as_they_were_sent(pair: Pair) -> None:
    first, second = pair
    states = [RankState(0, COLLECTIVE, "gather", 3, "[2]", "a.py", 7, 1.5), RankState(1, ELSEWHERE)]
    first.answer(1, states[0])
    assert second.answers(1, [0, 1]) == {0: states[0]}
    second.answer(1, states[1])
    assert first.answers(1, [0, 1]) == dict(enumerate(states))
    assert second.report(1) is None
    report = Report("hang", 0, False, [0], [1, 2], 12.5)
    first.announce(1, report)
    assert second.report(1) == report


def test_identities_and_endings_are_known_to_the_others(pair: Pair) -> None:
    first, second = pair
    who = Identity("a", "b", 7, 1.0)
    assert second.identity(0) is None
    first.introduce(who)
    assert second.identity(0) == who
    assert second.ending(0) is None
    first.leave("exited")
    assert second.ending(0) == "exited"


def test_one_tells_and_all_confirm(pair: Pair) -> None:
    first, second = pair
    assert [first.is_first_to_tell(), second.is_first_to_tell()] == [True, False]
    assert [first.confirmed(4), first.confirm(4), second.confirm(4), first.confirmed(4)] == [0, 1, 2, 2]
