"""Which life of a restarted run this is.

An elastic agent that starts the ranks anew keeps its store, with all that earlier lives left in it: the
addresses of dead processes among it. Whoever reads one fails to connect, or waits for ever. So the ranks that
were started together use a part of the store that no others use.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from accelerate.base import environ
from accelerate.base.errors import StateError
from accelerate.state.store_channel import StoreChannel
from accelerate.state.topology import Topology

LOOK_AGAIN = 0.5
"""Seconds that a rank waits for the others before it looks whether another life has begun."""

_name: list[str] = []


def name() -> str:
    """Return a name of this life: the same on all ranks that use the same part of the store."""
    return _name[0] if _name else _count()


def store_of_this_life(topology: Topology, patience: timedelta) -> Store | None:
    """Connect to the part of the agent's store that this life uses; called on all ranks.

    Args:
        topology: which process this is and where the others meet.
        patience: how long the ranks may take to come together.

    Returns:
        The store; None where nothing outlives a restart, or nothing was restarted yet.

    Raises:
        StateError: a rank did not come in time.
    """
    _name.clear()
    if environ.current().get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    on_one_machine = topology.local_size == topology.size
    if on_one_machine and _count() == "0":
        return None
    store = TCPStore(
        str(topology.address), int(topology.port or 0), None, False, patience, wait_for_workers=False
    )
    # Agents of several machines count restarts on their own: their ranks have to find each other.
    if on_one_machine:
        life = _count()
    else:
        channel = StoreChannel(store, "generation", environ.current())
        life = meet(channel, topology.rank, topology.size, patience)
    _name[:] = [life]
    return PrefixStore(f"life_{life}", store)


def meet(channel: StoreChannel, rank: int, size: int, patience: timedelta) -> str:
    """Return a name that all ranks started together get, and no others; called on all ranks.

    Rank 0 offers a name. Each rank answers under that name with a word of its own, and rank 0 repeats the
    words of all. A rank that does not find its own word there answered to an earlier life.

    Args:
        channel: a part of the store that all lives share.
        rank: of this process.
        size: number of ranks.
        patience: how long they may take.

    Raises:
        StateError: a rank did not come in time.
    """
    word, end = uuid4().hex, time.monotonic() + patience.total_seconds()
    if rank == 0:
        return _invite(channel, word, size, patience)
    answered = ""
    while time.monotonic() < end:
        life = channel.wait(["life"], LOOK_AGAIN)["life"]
        if life is None:
            continue
        if life != answered:
            channel.post(f"{life}/{rank}", word)
            answered = life
        words = channel.wait([f"{life}/all"], LOOK_AGAIN)[f"{life}/all"]
        if isinstance(words, list) and words[rank:][:1] == [word]:
            return str(life)
    raise _absent(0, patience)


def _invite(channel: StoreChannel, life: str, size: int, patience: timedelta) -> str:
    channel.post("life", life)
    found = channel.wait([f"{life}/{rank}" for rank in range(1, size)], patience.total_seconds())
    words = [life, *found.values()]
    if None in words:
        raise _absent(words.index(None), patience)
    channel.post(f"{life}/all", words)
    return life


def _absent(rank: int, patience: timedelta) -> StateError:
    return StateError(
        f"Rank {rank} did not come within {patience.total_seconds():.0f} s: its machine may be down."
    )


def _count() -> str:
    return environ.current().get("TORCHELASTIC_RESTART_COUNT", "0")
