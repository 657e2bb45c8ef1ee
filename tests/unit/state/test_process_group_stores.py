"""Ranks find those of their generation, whatever earlier ones left in the store, and those of their host."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import current_thread

import pytest
from torch.distributed import HashStore, TCPStore

from accelerate.base import StateError
from accelerate.state import StoreChannel, Topology, agreement, process_group

SECOND = timedelta(seconds=20)


def open_agent() -> TCPStore:
    """The store that is kept between restarts; deleting it closes its port."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(agent: TCPStore, delays: dict[int, float], size: int) -> list[str]:
    """Start ranks after their delays; the names that they agree on."""

    def come(rank: int) -> str:
        time.sleep(delays[rank])
        client = TCPStore("127.0.0.1", agent.port, is_master=False, wait_for_workers=False)
        return process_group.agree_on_generation(StoreChannel(client, "", {}), rank, size, SECOND)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(come, delays))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_generation_has_a_name_of_its_own(first: int) -> None:
    """In any order: ranks that join before rank 0 read the generation that has ended."""
    agent = open_agent()
    names = []
    for _ in range(3):
        found = start(agent, {rank: 0.0 if rank == first else 0.2 for rank in range(3)}, 3)
        assert len(set(found)) == 1
        names += found[:1]
    assert len(set(names)) == 3


def test_a_generation_that_ended_before_all_ranks_arrived_is_replaced() -> None:
    agent = open_agent()
    channel = StoreChannel(agent, "", {})
    channel.post("name", "lost")
    channel.post("lost/1", "of the dead")
    assert len(set(start(agent, {1: 0.0, 2: 0.0, 0: 0.7}, 3))) == 1


def test_ranks_that_arrive_in_any_order_have_one_name() -> None:
    agent = open_agent()
    draw = random.Random(5)
    for _ in range(5):
        assert len(set(start(agent, {rank: draw.random() / 4 for rank in range(4)}, 4))) == 1


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_missing_rank_is_named_after_the_timeout(rank: int, missing: int) -> None:
    agent = open_agent()
    channel = StoreChannel(agent, "", {})
    channel.post("name", "earlier")
    channel.post("earlier/read/1", "another word")
    with pytest.raises(StateError, match=f"Rank {missing} did not arrive within 1 s"):
        process_group.agree_on_generation(channel, rank, 2, timedelta(seconds=1))


def topology(rank: int, size: int) -> Topology:
    return Topology(rank, size, 0, 1, rank, "job-master-0", 1, "torchrun", needs_hosts=True)


@pytest.mark.parametrize(
    ("names", "places"),
    [
        ("ab", [(0, 1, 0), (0, 1, 1)]),
        ("aa", [(0, 2, 0), (1, 2, 0)]),
        ("baab", [(0, 2, 0), (0, 2, 1), (1, 2, 1), (1, 2, 0)]),
        ("aaba", [(0, 3, 0), (1, 3, 0), (0, 1, 1), (2, 3, 0)]),
    ],
)
def test_ranks_of_one_host_are_counted_together(
    names: str, places: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group.socket, "gethostname", lambda: current_thread().name)
    store, size = HashStore(), len(names)

    def find(rank: int) -> Topology:
        current_thread().name = names[rank]
        return process_group.exchange_hosts(topology(rank, size), store, timedelta(seconds=20))

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(find, range(size)))
    assert [(each.local_rank, each.local_size, each.node) for each in found] == places
    assert [each.rank for each in found] == list(range(size))
    assert not any(each.needs_hosts for each in found)


@pytest.mark.parametrize(("rank", "absent"), [(0, 1), (1, 0)])
def test_a_rank_whose_host_does_not_come_is_named(
    rank: int, absent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "DECISION_TIMEOUT", 0.05)
    with pytest.raises(StateError, match=f"Rank {absent} did not arrive within 0 s to .* set LOCAL_RANK"):
        process_group.exchange_hosts(topology(rank, 2), HashStore(), timedelta(seconds=0.1))


@pytest.mark.parametrize(("size", "who"), [(3, "Rank 1"), (4, "Ranks 1, 3")])
def test_all_ranks_name_those_that_rank_0_waits_for(size: int, who: str) -> None:
    store = HashStore()

    def find(rank: int) -> None:
        with pytest.raises(StateError, match=f"{who} did not arrive within 0 s"):
            process_group.exchange_hosts(topology(rank, size), store, timedelta(seconds=0.1))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(find, (2, 0)))
