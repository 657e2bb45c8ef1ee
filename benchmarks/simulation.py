"""Simulated ranks: the hang detectors and the agreement of many ranks, with counted requests."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import Activity, Limits, RankState, Report
from accelerate.diagnostics.peers import Identity, Peers
from accelerate.diagnostics.watching import Watchdog
from accelerate.state import StoreChannel

_METHODS = "set get add check wait append compare_set delete_key multi_get multi_set"
REQUESTS = frozenset(_METHODS.split(" "))


class CountingStore:
    """A store that counts requests by name, and the bytes of names and values in both directions.

    A request is one call. torch sends two messages for `get` and `multi_get`: it waits for the names first.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._counted(name, method) if name in REQUESTS else method

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.requests[name] += 1
            result = method(*arguments)
            self.bytes += sum(map(_size, (*arguments, result)))
            return result

        return call

    @property
    def total(self) -> int:
        return sum(self.requests.values())


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, list) else 8


class Host:
    """The processes of one simulated machine; `runs` returns which are running."""

    def __init__(self) -> None:
        self.dead: set[int] = set()

    def runs(self, pid: int, start_time: float | None = None) -> bool:
        return pid not in self.dead


class SimulatedRank(Watchdog):
    """A hang detector whose rank waits when the simulation says so; it notes when it knows of an end."""

    def __init__(self, store: CountingStore, rank: int, size: int, local_size: int, limits: Limits) -> None:
        self.store, self.wait_began = store, 0.0  # 0 while the rank does not wait
        self.reports: list[str] = []
        self.named_at: dict[int, float] = {}  # when this rank read that another one has ended
        own = Identity(f"host{rank // local_size}", "", rank, 0.0)
        channel = StoreChannel(store, "hangs", {"ACCELERATE_RUN_KEY": "secret"})  # type: ignore[arg-type]
        peers = Peers(channel, rank, size, own, local_size)
        super().__init__(rank, limits, peers, self, self)  # type: ignore[arg-type]

    # Interface of a `ThreadObserver`.

    def current_wait(self) -> tuple[object, float]:
        began = self.wait_began
        return (began, time.monotonic() - began) if began else (None, 0.0)

    def state(self) -> RankState:
        token, seconds = self.current_wait()
        activity = Activity.OTHER_CODE if token is None else Activity.COLLECTIVE
        return RankState(self.rank, activity, "gather", 1, file="train.py", line=7, seconds=seconds)

    def release(self) -> None:
        """End."""

    # Interface of a `HangReporter`.

    def publish(self, report: Report) -> None:
        self.reports.append(report.text)

    def withdraw(self, text: str) -> None:
        self.reports.append(text)

    def _follow(self, number: int, report: Report) -> None:
        now = time.time()
        self.named_at = dict.fromkeys(report.ended, now) | self.named_at
        super()._follow(number, report)

    def die(self, host: Host) -> None:
        """End without a message, as a process that is killed."""
        self.end()
        host.dead.add(self.rank)


class Driver:
    """Lets the detectors of many ranks look once per pause, in few threads; an inquiry holds its thread."""

    THREADS = 16

    def __init__(self, ranks: Sequence[SimulatedRank], pause: float) -> None:
        self._pause, self._ended = pause, threading.Event()
        self._due: queue.PriorityQueue[tuple[float, int]] = queue.PriorityQueue()
        self._ranks = ranks
        now = time.monotonic()
        for index in range(len(ranks)):  # ranks of a real run look at different times too
            self._due.put((now + pause * index / len(ranks), index))
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                due, index = self._due.get(timeout=self._pause)
            except queue.Empty:
                continue
            rank = self._ranks[index]
            if self._ended.wait(max(due - time.monotonic(), 0.0)) or rank.ended.is_set():
                continue
            rank.check()
            self._due.put((time.monotonic() + self._pause, index))

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def simulate_processes(host: Host) -> Callable[[], None]:
    """Let detectors look for simulated processes; what is returned takes that back."""
    before = processes.runs, processes.stack_of, processes.describe
    processes.runs = host.runs
    processes.stack_of = lambda pid: []
    processes.describe = lambda pid: "sleeps"

    def restore() -> None:
        processes.runs, processes.stack_of, processes.describe = before

    return restore


def call_together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Call functions at the same time, each in a thread; what they return."""
    calls = list(calls)
    results: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
