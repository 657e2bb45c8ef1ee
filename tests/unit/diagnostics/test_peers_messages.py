"""What ranks tell each other over a store."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from accelerate.diagnostics import Doing, Identity, Peers, RankState, Report, peers
from accelerate.state import StoreChannel

WHO = Identity("a", "b", 7, 1.0)
Pair = tuple[Peers, Peers]


@pytest.fixture
def pair() -> Pair:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    first, second = (Peers(StoreChannel(store, "", {}), rank, 2, WHO) for rank in range(2))
    return first, second


def test_one_of_two_that_ask_at_the_same_time_is_the_first(pair: Pair) -> None:
    first, second = pair
    assert first.inquiry() == 0
    assert [first.ask(0), second.ask(0)] == [True, False]
    assert second.inquiry() == 1
    assert second.ask(1)


def test_states_and_reports_arrive_as_they_were_sent(pair: Pair) -> None:
    first, second = pair
    states = [
        RankState(0, Doing.COLLECTIVE, "gather", 3, "[2]", "a.py", 7, 1.5),
        RankState(1, Doing.OTHER_CODE),
    ]
    first.answer(1, states[0])
    assert second.answers(1, [0, 1]) == {0: states[0]}
    second.answer(1, states[1])
    assert first.answers(1, [0, 1]) == dict(enumerate(states))
    assert second.report(1) is None
    report = Report("hang", 0, False, [0], [1, 2], 12.5)
    first.announce(1, report)
    assert second.report(1) == report


def test_identities_and_endings_are_known_to_the_others(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    first, second = pair
    monkeypatch.setattr(peers.processes, "runs", lambda pid, born: (pid, born) == (WHO.pid, WHO.born))
    assert second.ending(0) is None
    state = second.silent_state(0)
    assert (state.host, state.pid) == (WHO.host, WHO.pid)
    first.leave("exited")
    assert second.ending(0) == "exited"


def test_one_reports_and_all_confirm(pair: Pair) -> None:
    first, second = pair
    assert [first.is_first_to_report(), second.is_first_to_report()] == [True, False]
    assert [first.confirm(4, 0), first.confirm(4), second.confirm(4), first.confirm(4, 0)] == [0, 1, 2, 2]
