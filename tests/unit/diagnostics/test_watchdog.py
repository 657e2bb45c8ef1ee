"""Two watchers, one of which sees its rank wait."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict

import pytest
from torch.distributed import HashStore

from accelerate.diagnostics.hang_report import Activity, Limits, RankState, Report
from accelerate.diagnostics.peers import Peers, own_identity
from accelerate.diagnostics.watching import Watchdog
from accelerate.launch import KEY_VARIABLE
from accelerate.state import StoreChannel


class Seen:
    """An observer with the values that a test sets."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wait: tuple[object, float] = (None, 0.0)

    def current_wait(self) -> tuple[object, float]:
        return self.wait

    def state(self) -> RankState:
        activity = Activity.OTHER_CODE if self.wait[0] is None else Activity.COLLECTIVE
        return RankState(self.rank, activity, "gather", file="a.py", line=self.rank, seconds=self.wait[1])


class Kept:
    """A reporter that keeps what it gets."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ends = 0

    def publish(self, report: Report) -> None:
        self.texts.append(report.text)

    def withdraw(self, text: str) -> None:
        self.texts.append(text)

    def prepare_end(self, _: Report) -> None:
        self.ends += 1

    def end(self) -> None:
        self.ends += 1


class Pair:
    """Two ranks whose watchers look when the test calls them; rank 1 looks in a thread while rank 0 does."""

    def __init__(self, ends: bool, key: str | None = "secret") -> None:
        store, own = HashStore(), own_identity()
        self.seen, self.kept = (Seen(0), Seen(1)), (Kept(), Kept())
        channel = StoreChannel(store, "", {} if key is None else {KEY_VARIABLE: key})
        self.peers = [Peers(channel, rank, 2, own, 2) for rank in range(2)]
        self.watchdogs = [self.build(rank, ends) for rank in range(2)]

    def build(self, rank: int, ends: bool) -> Watchdog:
        seen, kept = self.seen[rank], self.kept[rank]
        return Watchdog(rank, Limits(5.0, ends), self.peers[rank], seen, kept)  # type: ignore[arg-type]

    def check(self) -> None:
        """Rank 0 looks once; meanwhile and afterwards rank 1 looks again and again."""
        done = threading.Event()

        def look_on() -> None:
            while not done.wait(0.02):
                self.watchdogs[1].check()
            self.watchdogs[1].check()

        thread = threading.Thread(target=look_on)
        thread.start()
        self.watchdogs[0].check()
        time.sleep(0.1)
        done.set()
        thread.join()


@pytest.mark.parametrize("ends", [False, True])
def test_a_wait_longer_than_the_limit_is_reported_once(ends: bool) -> None:
    pair = Pair(ends)
    pair.seen[0].wait = (1, 4.0)
    pair.check()
    assert pair.kept[0].texts == []
    pair.seen[0].wait = (1, 6.0)
    pair.check()
    (text,) = pair.kept[0].texts
    assert "rank 0 waits in gather #0, a.py:0, since 6 s; rank 1 is in gather, a.py:1 (not in a" in text
    assert pair.kept[1].texts == []
    assert [kept.ends for kept in pair.kept] == [2 * ends, 2 * ends]


def test_a_hang_is_reported_at_growing_intervals_and_withdrawn_when_it_ends() -> None:
    pair = Pair(ends=False)
    for seconds in (6.0, 7.0, 11.0, 13.0, 20.0, 27.0):
        pair.seen[0].wait = (1, seconds)
        pair.check()
    assert [text.count("since") for text in pair.kept[0].texts] == [1, 1, 1]
    pair.seen[0].wait = (None, 0.0)
    pair.check()
    pair.check()
    assert pair.kept[0].texts[-1] == "accelerate: the hang is over: rank 0 continues."


def test_an_end_is_named_at_once() -> None:
    pair = Pair(ends=False)
    pair.peers[1].leave("exited with ValueError")
    pair.seen[0].wait = (1, 2.5)
    pair.watchdogs[0].check()
    (text,) = pair.kept[0].texts
    assert text.startswith(
        "accelerate: hang: rank 0 waits in gather #0, a.py:0, since 2 s; rank 1 has exited with"
    )
    pair.watchdogs[0].check()
    assert len(pair.kept[0].texts) == 1


def test_the_message_of_a_lost_rank_names_the_rank_that_ended_first() -> None:
    pair = Pair(ends=False)
    pair.peers[1].leave("exited with ValueError")
    failed_operation = RankState(0, Activity.COLLECTIVE, "gather", 1, file="a.py", line=9)
    pair.watchdogs[0].post_end("exited with RuntimeError", True, failed_operation)
    (text,) = pair.kept[0].texts
    assert "rank 1 has exited with ValueError" in text
    pair.peers[1].events()
    assert pair.peers[1].ended() == {0: "exited with RuntimeError"}


def plant(pair: Pair, key: str) -> None:
    """Write a report as a process with access to the store and with this key."""
    channel = StoreChannel(pair.peers[0]._channel._store, "", {KEY_VARIABLE: key})
    channel.post("report/1", asdict(Report("end now", 0, True, 2, [])))
    channel.count("events", (1 << 41) + (1 << 20))


def test_a_report_with_another_signature_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(ends=True)
    plant(pair, "another")
    pair.check()
    pair.check()
    assert [kept.ends for kept in pair.kept] == [0, 0]
    assert pair.kept[0].texts == []
    assert "none of its ranks has written (/report/1): it is ignored" in caplog.text


@pytest.mark.parametrize(("seconds", "ends"), [(1.0, [0, 0]), (6.0, [2, 0])])
def test_without_a_key_a_rank_ends_by_its_own_observation(seconds: float, ends: list[int]) -> None:
    pair = Pair(ends=True, key="")
    plant(pair, "")
    pair.seen[0].wait = (1, seconds)
    pair.check()
    assert [kept.ends for kept in pair.kept] == ends
