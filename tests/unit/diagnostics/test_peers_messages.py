"""What ranks tell each other over a store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from accelerate.diagnostics import peers
from accelerate.diagnostics.hang_report import Activity, RankState, Report
from accelerate.diagnostics.peers import EventCounts, Identity, Peers
from accelerate.state import StoreChannel

WHO = Identity("a", "b", 7, 1.0)
Pair = tuple[Peers, Peers]


@pytest.fixture
def pair() -> Pair:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    first, second = (Peers(StoreChannel(store, "", {}), rank, 2, WHO, 2) for rank in range(2))
    return first, second


def test_of_two_simultaneous_requests_one_is_the_first(pair: Pair) -> None:
    first, second = pair
    assert first.events().asked == 0
    assert [first.ask(0), second.ask(0)] == [True, False]
    assert second.events().asked == 1
    assert second.ask(1)


def test_states_and_reports_are_received_as_sent(pair: Pair) -> None:
    first, second = pair
    states = [
        RankState(0, Activity.COLLECTIVE, "gather", 3, "[2]", "a.py", 7, 1.5),
        RankState(1, Activity.OTHER_CODE),
    ]
    first.answer(1, states[0])
    assert second.answers(1) == {0: states[0]}
    second.answer(1, states[1])
    assert first.answers(1) == dict(enumerate(states))
    assert second.report(1) is None
    assert second.events().reported == 0
    report = Report("hang", 0, False, 1, [1, 2], 12.5)
    first.announce(1, report)
    assert second.report(1) == report
    assert second.events() == EventCounts(ended=0, reported=1, asked=0)
    assert first.answers(1) == {}


def test_identities_and_endings_are_known_to_the_others(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    first, second = pair
    monkeypatch.setattr(
        peers.processes, "runs", lambda pid, start_time: (pid, start_time) == (WHO.pid, WHO.start_time)
    )
    second.check_local_processes(is_waiting=True)
    assert second.ended() == {}
    (state,) = second.silent_states([0])
    assert (state.host, state.pid) == (WHO.host, WHO.pid)
    first.leave("exited")
    assert second.ended() == {}  # as of the last look at the counter
    assert second.events().ended == 1
    assert second.ended() == {0: "exited"}


def test_one_rank_reports_and_all_ranks_confirm(pair: Pair) -> None:
    first, second = pair
    assert [first.is_first_to_report(), second.is_first_to_report()] == [True, False]
    order = []

    def confirm() -> None:
        first.confirm(4, 2, 20.0)
        order.append("all")

    thread = threading.Thread(target=confirm)
    thread.start()
    time.sleep(0.1)
    order.append("second")
    second.confirm(4, 2, 20.0)
    thread.join()
    assert order == ["second", "all"]
