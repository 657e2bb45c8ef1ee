"""Which ranks run on the same host, where the starter did not say: the ranks exchange host names."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import timedelta

from accelerate.base import StateError
from accelerate.state.store_channel import StoreChannel
from accelerate.state.topology import Topology


def find_place(topology: Topology, channel: StoreChannel, timeout: timedelta) -> Topology:
    """Complete a topology with the place of this rank on its host. Called on all ranks.

    Rank 0 collects the names and publishes the list, so that each other rank reads one value.

    Args:
        topology: rank and world size are known.
        channel: part of a store that all ranks reach.
        timeout: how long the ranks may take.

    Returns:
        The topology with `local_rank`, `local_size` and `node`. Ranks of one host count from 0 in the order
        of their ranks; hosts count from 0 in the order of their first ranks.

    Raises:
        StateError: a rank did not come in time.
    """
    rank, seconds = topology.rank, timeout.total_seconds()
    channel.post(str(rank), socket.gethostname())
    names = [str(each) for each in range(topology.size)]
    if rank == 0:
        found = channel.wait(names, seconds)
        absent = [each for each, host in found.items() if host is None]
        if absent:
            raise _absent(absent, seconds)
        channel.post("all", list(found.values()))
    hosts = channel.wait(["all"], seconds)["all"]
    if hosts is None:
        others = channel.read_all(names[1:])  # rank 0 may still wait for these
        raise _absent([each for each, host in others.items() if host is None] or ["0"], seconds)
    beside = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    node = list(dict.fromkeys(hosts)).index(hosts[rank])
    return replace(
        topology, local_rank=beside.index(rank), local_size=len(beside), node=node, needs_hosts=False
    )


def _absent(ranks: list[str], seconds: float) -> StateError:
    who = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(ranks)}"
    return StateError(
        f"{who} did not come within {seconds:.0f} s to exchange host names. See the output there; set "
        "LOCAL_RANK and LOCAL_WORLD_SIZE on every rank where host names should not be exchanged."
    )
