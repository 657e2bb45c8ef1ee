"""Ranks that wait in `init_process_group`, as threads of one process on one store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore

from accelerate.diagnostics import arrivals
from accelerate.diagnostics.arrivals import ArrivalWatch, Message, WaitingRank
from accelerate.diagnostics.hang_report import Limits, Report
from accelerate.diagnostics.processes import Siblings
from accelerate.launch import KEY_VARIABLE
from accelerate.state import StoreChannel, Topology

LIMITS = Limits(0.3, False)
ENDS = Limits(0.3, True)


class Kept:
    """A reporter that keeps what it gets; ending ends nothing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.texts: list[str] = []
        self.ended: list[str] = []

    def publish(self, report: Report) -> None:
        self.texts.append(report.text)

    def withdraw(self, text: str) -> None:
        self.texts.append(text)

    def prepare_end(self, report: Report) -> None:
        self.ended.append(report.text)

    def end(self) -> None:
        pass


class Ranks:
    """Some of three ranks, each in a thread that waits until the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: HashStore | None = HashStore()
        self.key: str | None = "key"
        self.kept = [Kept(rank) for rank in range(3)]
        self.open = threading.Event()
        self.threads: list[threading.Thread] = []
        monkeypatch.setattr(ArrivalWatch, "_connect", lambda _: self.store and self.channel())
        monkeypatch.setattr(arrivals, "HangReporter", lambda rank, size, environ: self.kept[rank])

    def channel(self) -> StoreChannel:
        assert self.store is not None
        return StoreChannel(self.store, "arrivals", {} if self.key is None else {KEY_VARIABLE: self.key})

    def come(self, *ranks: int, limits: Limits = LIMITS) -> None:
        for rank in ranks:
            self.threads.append(threading.Thread(target=self._wait, args=(rank, limits)))
            self.threads[-1].start()

    def _wait(self, rank: int, limits: Limits) -> None:
        with ArrivalWatch(Topology(rank, 3, rank, 3, address="host", port=1), 0, limits, {}):
            self.open.wait(60)

    def until(self, is_so: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 30
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_so(), [kept.texts for kept in self.kept]

    def go(self) -> list[str]:
        """Release all ranks; return all reports."""
        self.open.set()
        for thread in self.threads:
            thread.join()
        return [text for kept in self.kept for text in kept.texts]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_the_lowest_waiting_rank_reports_missing_ranks_once_and_the_end_of_the_hang(ranks: Ranks) -> None:
    ranks.come(1, 2)
    ranks.until(lambda: ranks.kept[1].texts)
    time.sleep(3 * LIMITS.timeout)
    ranks.come(0)
    text, over = ranks.go()
    assert text.startswith("accelerate: hang: ranks 1-2 wait in init_process_group, "), text
    assert "; rank 0 did not come, and no rank that waits can see what it does.\n" in text
    assert over == "accelerate: the hang is over: rank 1 continues."


def test_ranks_that_join_in_time_report_nothing(ranks: Ranks) -> None:
    ranks.come(0, 1, 2)
    time.sleep(LIMITS.timeout / 2)
    assert ranks.go() == []


def test_a_rank_reports_missing_ranks_of_its_machine_with_their_stack(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Siblings(77, {0: 1}, is_complete=True)
    monkeypatch.setattr(arrivals.processes, "find_siblings", lambda rank: seen)
    monkeypatch.setattr(arrivals.processes, "describe", lambda pid: "sleeps")
    monkeypatch.setattr(arrivals.processes, "stack_of", lambda pid: [("train.py", 3, "prepare")])
    ranks.come(2)
    ranks.until(lambda: ranks.kept[2].texts)
    (text, _) = ranks.go()
    assert "rank 0 did not come: its process 1 on " in text
    assert 'is at:\n  File "train.py", line 3, in prepare' in text
    assert "rank 1 has ended before it came (process 77 on " in text


def test_all_ranks_end_when_a_hang_ends_the_run(ranks: Ranks) -> None:
    ranks.come(0, 2, limits=ENDS)
    ranks.until(lambda: ranks.kept[0].ended and ranks.kept[2].ended)
    ranks.go()
    assert "rank 1 did not come" in ranks.kept[0].ended[0]
    assert ranks.kept[0].ended[0] == ranks.kept[2].ended[0]
    assert [text for text in ranks.kept[2].texts if "hang:" in text] == []


@pytest.mark.parametrize(
    "last", [Message([1], [], 1, 0, "an old report", True), Message([], []), Message([2], [0, 1])]
)
def test_messages_of_processes_before_a_restart_are_ignored(ranks: Ranks, last: Message) -> None:
    channel = ranks.channel()
    channel.append("waiting/1", asdict(WaitingRank(0, "starting", host="host", pid=1)))
    channel.post("message/2", asdict(last))
    channel.count("messages", 2)
    ranks.come(1, 2)
    ranks.until(lambda: ranks.kept[1].texts or ranks.kept[2].texts)  # of the one that looked first
    assert re.search(r"rank 0 did not come|ranks 0-1 did not come", ranks.go()[0])  # rank 1 may come late
    assert [kept.ended for kept in ranks.kept] == [[], [], []]


def test_the_report_names_ranks_that_arrived_and_do_not_connect(ranks: Ranks) -> None:
    ranks.come(0, 1, 2)
    ranks.until(lambda: ranks.kept[0].texts)
    text, _ = ranks.go()
    assert text.startswith("accelerate: hang: ranks 0-2 wait in init_process_group")
    assert "All ranks have come, and do not connect to each other" in text


def test_without_the_store_each_rank_reports_the_address_of_rank_0(ranks: Ranks) -> None:
    ranks.store = None
    ranks.come(1, 2)
    ranks.until(lambda: ranks.kept[1].texts and ranks.kept[2].texts)
    texts = ranks.go()
    for rank in (1, 2):
        assert any(
            text.startswith(f"accelerate: hang: rank {rank} waits in init_process_group")
            and "rank 0 did not come, and no rank that waits can see what it does; "
            "it does not answer at host:1."
            in text
            for text in texts
        ), texts


def test_an_end_that_is_not_signed_ends_no_rank_that_has_waited_less(ranks: Ranks) -> None:
    ranks.key = None
    ranks.come(1, limits=Limits(60.0, True))
    channel = ranks.channel()
    for number, message in enumerate([Message([], []), Message([0], [], 1, 1, "not a report", True)], 1):
        channel.post(f"message/{number}", asdict(message))
        channel.count("messages", 1)
        if number == 1:
            ranks.until(lambda: channel.read_list("waiting/1"))
    ranks.until(lambda: ranks.kept[1].texts)
    assert ranks.go()[0] == "not a report"
    assert ranks.kept[1].ended == []
