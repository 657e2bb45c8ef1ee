"""How many requests everything that uses the store of a run makes, at any number of ranks."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from accelerate.checkpointing import Request, Saver
from accelerate.diagnostics import arrivals, memory
from accelerate.diagnostics.arrivals import ArrivalWatch
from accelerate.diagnostics.hang_report import Limits
from accelerate.state import PartialState, StoreChannel, StoreConsensus, Topology, process_group

MODULE = "simulation"
PATH = Path(__file__).parents[2] / "benchmarks" / f"{MODULE}.py"
LIMITS = Limits(1.0, False)
LOCAL = 8
IDLE, WAITING, INQUIRY, AGREEMENT, SAVE = 0.25, 1.0, 10, 6, 12
"""Requests that a rank may make while it is idle, while it waits, for an inquiry, a decision, and a save."""


@pytest.fixture(scope="module")
def simulation() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location(MODULE, PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[MODULE]


@pytest.fixture
def host(simulation: Any) -> Iterator[Any]:
    host = simulation.Host()
    restore = simulation.simulate_processes(host)
    yield host
    restore()


def ranks_of(simulation: Any, size: int, limits: Limits = LIMITS) -> list[Any]:
    store = HashStore()
    ranks = [
        simulation.SimulatedRank(simulation.CountingStore(store), rank, size, LOCAL, limits)
        for rank in range(size)
    ]
    for _ in range(8):  # ranks of a machine get to know each other
        for rank in ranks:
            rank.check()
    return ranks


def made_by(stores: list[Any], act: Callable[[], Any]) -> list[int]:
    """How many requests each rank makes."""
    before = [store.total for store in stores]
    act()
    return [store.total - count for store, count in zip(stores, before, strict=True)]


SIZES = pytest.mark.parametrize("size", [pytest.param(8, marks=pytest.mark.slow), 64])


@SIZES
def test_ranks_that_train(simulation: Any, host: Any, size: int) -> None:
    ranks = ranks_of(simulation, size)
    made = made_by([r.store for r in ranks], lambda: [rank.check() for _ in range(40) for rank in ranks])
    assert max(made) <= 40 * IDLE


@SIZES
def test_ranks_that_wait(simulation: Any, host: Any, size: int) -> None:
    ranks = ranks_of(simulation, size, Limits(1000.0, False))
    for rank in ranks:
        rank.wait_began = time.monotonic() - 100.0
    made = made_by([r.store for r in ranks], lambda: [rank.check() for _ in range(40) for rank in ranks])
    assert max(made) <= 40 * WAITING


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_so()


def run(ranks: list[Any], is_over: Callable[[], bool]) -> None:
    """Let the detectors look in their threads until something is so."""
    for rank in ranks:
        rank.start()
    until(is_over)
    for rank in ranks:
        rank.end()
    for rank in ranks:
        rank._thread.join()


@SIZES
@pytest.mark.parametrize("num_idle", [0, 1])
def test_an_inquiry(simulation: Any, host: Any, size: int, num_idle: int) -> None:
    ranks = ranks_of(simulation, size)
    for rank in ranks[num_idle:]:
        rank.wait_began = time.monotonic() - 1.0
    for rank in ranks:
        rank.post_end = lambda *_: None
    looks = [0] * size

    def count(rank: Any) -> None:
        rank.check, check = lambda: (looks.__setitem__(rank.rank, looks[rank.rank] + 1), check()), rank.check

    for rank in ranks:
        count(rank)
    made = made_by([r.store for r in ranks], lambda: run(ranks, lambda: all(rank._read for rank in ranks)))
    # The look at the counter of each second is not the inquiry's.
    of_inquiry = [number - num_looks for number, num_looks in zip(made, looks, strict=True)]
    assert max(of_inquiry) <= INQUIRY, (made, looks)
    assert sum(made) <= INQUIRY * size
    (text,) = [text for rank in ranks for text in rank.reports]
    assert "gather #1, train.py:7" in text
    assert "no answer" not in text
    assert ("rank 0 is in gather" in text) == bool(num_idle)


@SIZES
def test_an_ended_rank_is_known_to_all_ranks_with_few_requests(simulation: Any, host: Any, size: int) -> None:
    ranks = ranks_of(simulation, size, Limits(3.0, False))
    dead, others = ranks[3], [*ranks[:3], *ranks[4:]]
    for rank in others:
        rank.wait_began = time.monotonic()
        rank.post_end = lambda *_: None
    dead.die(host)
    stores = [rank.store for rank in others]
    made = made_by(stores, lambda: run(others, lambda: all(3 in rank.named_at for rank in others)))
    assert sum(made) <= INQUIRY * size
    (text,) = [text for rank in ranks for text in rank.reports]
    assert "rank 3 has died without a message (process 3 on host0)" in text


def test_a_slow_store_is_no_missing_rank(simulation: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes longer than ranks have to answer where the store is fast."""
    watching = sys.modules["accelerate.diagnostics.watching"]
    monkeypatch.setattr(watching, "_SLOW", 0.1)
    ranks = ranks_of(simulation, 2)
    for rank in ranks:
        rank.wait_began = time.monotonic() - 5.0
        rank.post_end = lambda *_: None
        counted = rank.store._counted
        rank.store._counted = lambda name, method, counted=counted: delayed(counted(name, method))
    run(ranks, lambda: any(rank.reports for rank in ranks))
    (text,) = [text for rank in ranks for text in rank.reports]
    assert "ranks 0-1 wait in gather" in text
    stopped = ranks_of(simulation, 2)
    asker = stopped[0]
    asker.wait_began = time.monotonic() - 5.0
    asker.store._counted = lambda name, method, counted=asker.store._counted: delayed(counted(name, method))
    asker.check()
    (text,) = asker.reports
    assert "rank 1 gave no answer yet: the store of the run is slow (0.2 s for a request)" in text


def delayed(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        time.sleep(0.2)
        return method(*arguments)

    return call


@SIZES
@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.usefixtures("states")
def test_agreement_on_a_checkpoint(simulation: Any, size: int, numbered: bool, tmp_path: Path) -> None:
    PartialState(cpu=True)
    stores = connect(simulation, size)
    ranks = [StoreConsensus(channel(store), rank, size) for rank, store in enumerate(stores)]
    request = Request(tmp_path / "checkpoint_0", 60.0, iteration=0 if numbered else None)

    def save(consensus: StoreConsensus) -> None:
        saver = Saver(consensus)
        saver.begin(request)
        saver.write([], threads=1)
        saver.commit()

    for _ in range(3):
        made = made_by(stores, lambda: simulation.call_together(partial(save, rank) for rank in ranks))
        assert max(made) <= SAVE
    assert (tmp_path / "checkpoint_2").is_dir() == numbered


def connect(simulation: Any, size: int) -> list[Any]:
    store = HashStore()
    return [simulation.CountingStore(store) for _ in range(size)]


def channel(store: Any) -> StoreChannel:
    return StoreChannel(store, "part", {"ACCELERATE_RUN_KEY": "secret"})


@SIZES
def test_agreement_of_attempts(simulation: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = connect(simulation, size)
    monkeypatch.setattr(memory.torch_private, "default_store", lambda: stores[0])
    states = [SimpleNamespace(process_index=rank, num_processes=size) for rank in range(size)]
    attempts = [memory.StoreAttempts(*pair) for pair in zip(states, stores, strict=True)]  # type: ignore[arg-type]
    for each in attempts:
        each._attempt = 1
    agree = [partial(each.agree, False, 8) for each in attempts]
    made = made_by(stores, lambda: simulation.call_together(agree))
    assert max(made[1:]) <= AGREEMENT
    assert sum(made) <= AGREEMENT * size


@SIZES
def test_host_names(simulation: Any, size: int) -> None:
    stores = connect(simulation, size)
    second = timedelta(seconds=60)

    def find(rank: int) -> Topology:
        topology = Topology(rank, size, 0, 1, rank, "host", 1, "torchrun", needs_hosts=True)
        return process_group.exchange_hosts(topology, stores[rank], second)

    made = made_by(stores, lambda: simulation.call_together(partial(find, rank) for rank in range(size)))
    assert max(made) <= AGREEMENT


@SIZES
def test_restart_generations(simulation: Any, size: int) -> None:
    stores = connect(simulation, size)
    started = time.monotonic()
    agree = process_group.agree_on_generation
    calls = [partial(agree, channel(stores[n]), n, size, timedelta(seconds=60)) for n in range(size)]
    made = made_by(stores, lambda: simulation.call_together(calls))
    looks = 2 * (time.monotonic() - started) / process_group.MIN_POLL_INTERVAL
    assert max(made) <= AGREEMENT + looks


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 32])
def test_ranks_that_wait_for_missing_ones(
    simulation: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, looks, open_ = connect(simulation, size), [0] * size, threading.Event()
    reports: list[str] = []
    reporter = SimpleNamespace(publish=lambda report: reports.append(report.text), withdraw=reports.append)
    monkeypatch.setattr(arrivals, "HangReporter", lambda *_: reporter)
    monkeypatch.setattr(ArrivalWatch, "_connect", lambda watch: channel(stores[watch._rank]))
    check = ArrivalWatch._check

    def counted(watch: ArrivalWatch) -> None:
        looks[watch._rank] += 1
        check(watch)

    inquire, inquiries = ArrivalWatch._inquire, [0]  # on a loaded machine a rank asks again

    def counted_inquire(watch: ArrivalWatch, channel: StoreChannel) -> None:
        inquiries[0] += 1
        inquire(watch, channel)

    monkeypatch.setattr(ArrivalWatch, "_check", counted)
    monkeypatch.setattr(ArrivalWatch, "_inquire", counted_inquire)

    def wait(rank: int) -> None:
        with ArrivalWatch(Topology(rank, size, 0, 1, rank, address="host", port=1), 0, LIMITS, {}):
            open_.wait(60)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    until(lambda: bool(reports))
    time.sleep(3 * LIMITS.interval)
    open_.set()
    for thread in threads:
        thread.join()
    assert "rank 0 did not come" in reports[0]
    made = [store.total - num_looks for store, num_looks in zip(stores, looks, strict=True)]
    assert max(made) <= INQUIRY * inquiries[0], (made, inquiries)
