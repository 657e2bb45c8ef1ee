"""The place of a rank on its host, from host names that all ranks exchange."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import current_thread

import pytest
from torch.distributed import HashStore

from accelerate.base import StateError
from accelerate.state import StoreChannel, Topology, hosts


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
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: current_thread().name)
    store, size = HashStore(), len(names)

    def find(rank: int) -> Topology:
        current_thread().name = names[rank]
        channel = StoreChannel(store, "hosts", {"ACCELERATE_RUN_KEY": "key"})
        return hosts.find_place(topology(rank, size), channel, timedelta(seconds=20))

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(find, range(size)))
    assert [(each.local_rank, each.local_size, each.node) for each in found] == places
    assert [each.rank for each in found] == list(range(size))
    assert not any(each.needs_hosts for each in found)


@pytest.mark.parametrize(("rank", "absent"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(rank: int, absent: int) -> None:
    channel = StoreChannel(HashStore(), "hosts", {})
    with pytest.raises(StateError, match=f"Rank {absent} did not come within 0 s .* set LOCAL_RANK"):
        hosts.find_place(topology(rank, 2), channel, timedelta(seconds=0.1))


@pytest.mark.parametrize(("size", "who"), [(3, "Rank 1"), (4, "Ranks 1, 3")])
def test_all_ranks_name_those_that_rank_0_waits_for(size: int, who: str) -> None:
    store = HashStore()
    channel = StoreChannel(store, "hosts", {})
    for rank in (2, 0):
        with pytest.raises(StateError, match=f"{who} did not come within 0 s"):
            hosts.find_place(topology(rank, size), channel, timedelta(seconds=0.1))
