"""Whether other processes live, and what ranks tell each other over a store."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from accelerate.diagnostics import peers
from accelerate.diagnostics.hang_report import Activity, RankState, Report
from accelerate.diagnostics.peers import EventCounts, Identity, Peers, own_identity
from accelerate.state import StoreChannel


def test_processes_are_running_ended_or_on_another_machine() -> None:
    own = own_identity()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    channel = StoreChannel(HashStore(), "", {})
    peers = Peers(channel, 0, 6, own, 4)
    Peers(channel, 1, 6, own, 4)
    Peers(channel, 2, 6, replace(own, pid=ended.pid), 4)
    Peers(channel, 3, 6, replace(own, host="far"), 1)
    Peers(channel, 4, 6, own, 4).leave("exited with ValueError")
    peers.check_local_processes(is_waiting=False)
    dead = f"died without a message (process {ended.pid} on {own.host})"
    assert peers.ended() == {2: dead, 4: "exited with ValueError"}
    states = {state.rank: state for state in peers.silent_states(peers.others)}
    assert [rank for rank, state in states.items() if state.activity == Activity.ENDED] == [2, 4]
    assert states[1].activity == Activity.SILENT
    assert "runs but gives no answer" in states[1].ending
    assert "gives no answer (process" in states[3].ending
    assert "has built no Accelerator yet" in states[5].ending


def test_a_reused_pid_is_another_process() -> None:
    own = own_identity()
    channel = StoreChannel(HashStore(), "", {})
    Peers(channel, 1, 2, replace(own, start_time=own.start_time - 100), 2)
    peers = Peers(channel, 0, 2, own, 2)
    peers.check_local_processes(is_waiting=False)
    assert list(peers.ended()) == [1]


def test_the_lowest_running_rank_reports_for_its_machine() -> None:
    """Its messages are read by a rank of another machine, which sees none of these processes."""
    own, channel = own_identity(), StoreChannel(HashStore(), "", {})
    dead = replace(own, start_time=own.start_time - 100)
    ranks = [Peers(channel, rank, 5, dead if rank in (0, 3) else own, 4) for rank in range(4)]
    far = Peers(channel, 4, 5, replace(own, host="far"), 1)
    ranks[2].check_local_processes(is_waiting=False)
    far.events()
    assert far.ended() == {}
    for _ in range(2):
        ranks[1].check_local_processes(is_waiting=False)
        ranks[2].check_local_processes(is_waiting=True)
        assert far.events().ended == 2
    text = f"died without a message (process {own.pid} on {own.host})"
    assert far.ended() == ranks[2].ended() == {0: text, 3: text}


def test_a_process_that_posted_its_end_has_its_message() -> None:
    own, channel = own_identity(), StoreChannel(HashStore(), "", {})
    peers = Peers(channel, 0, 2, own, 2)
    Peers(channel, 1, 2, replace(own, start_time=own.start_time - 100), 2).leave("exited")
    peers.check_local_processes(is_waiting=False)
    assert peers.ended() == {1: "exited"}
    assert peers.events().ended == 1


WHO = Identity("a", "b", 7, 1.0)
Pair = tuple[Peers, Peers]


@pytest.fixture
def pair() -> Pair:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    first, second = (Peers(StoreChannel(store, "", {}), rank, 2, WHO, 2) for rank in range(2))
    return first, second


def test_only_one_of_two_simultaneous_requests_is_the_first(pair: Pair) -> None:
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
