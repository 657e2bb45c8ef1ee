"""Ranks that are started together find each other, whatever earlier generations left in the store."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate.base import StateError
from accelerate.state import StoreChannel, restarts

SECOND = timedelta(seconds=20)


def open_agent() -> dist.TCPStore:
    """The store that outlives restarts; a test that lets go of it closes its port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(agent: dist.TCPStore, delays: dict[int, float], size: int) -> list[str]:
    """Start ranks after their delays; the names that they agree on."""

    def come(rank: int) -> str:
        time.sleep(delays[rank])
        client = dist.TCPStore("127.0.0.1", agent.port, is_master=False, wait_for_workers=False)
        return restarts.agree_on_generation(StoreChannel(client, "", {}), rank, size, SECOND)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(come, delays))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_generation_has_a_name_of_its_own(first: int) -> None:
    """Whoever is late: ranks that come before rank 0 see the generation that has ended."""
    agent = open_agent()
    names = []
    for _ in range(3):
        found = start(agent, {rank: 0.0 if rank == first else 0.2 for rank in range(3)}, 3)
        assert len(set(found)) == 1
        names += found[:1]
    assert len(set(names)) == 3


def test_a_generation_that_ended_before_all_had_come() -> None:
    agent = open_agent()
    channel = StoreChannel(agent, "", {})
    channel.post("name", "lost")
    channel.post("lost/1", "of the dead")
    assert len(set(start(agent, {1: 0.0, 2: 0.0, 0: 0.7}, 3))) == 1


def test_at_random() -> None:
    agent = open_agent()
    draw = random.Random(5)
    for _ in range(5):
        assert len(set(start(agent, {rank: draw.random() / 4 for rank in range(4)}, 4))) == 1


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_who_does_not_come_is_named(rank: int, missing: int) -> None:
    agent = open_agent()
    channel = StoreChannel(agent, "", {})
    channel.post("name", "earlier")
    channel.post("earlier/all", ["earlier", "another word"])
    with pytest.raises(StateError, match=f"Rank {missing} did not come within 1 s"):
        restarts.agree_on_generation(channel, rank, 2, timedelta(seconds=1))
