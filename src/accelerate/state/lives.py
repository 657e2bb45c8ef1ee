"""Which life of a restarted run this is.

An elastic agent that starts the ranks anew keeps its store, with all that earlier lives left in it: the
addresses of dead processes among it. Whoever reads one fails to connect, or waits for ever. So the ranks that
were started together use a part of the store that no others use.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from accelerate.base import environ
from accelerate.base.errors import StateError
from accelerate.state.topology import Topology

LOOK_AGAIN = timedelta(seconds=0.5)
"""How long a rank waits for the others before it looks whether another life has begun."""

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
    life = _count() if on_one_machine else meet(store, topology.rank, topology.size, patience)
    _name[:] = [life]
    return PrefixStore(f"life_{life}", store)


def meet(store: Store, rank: int, size: int, patience: timedelta) -> str:
    """Return a name that all ranks started together get, and no others; called on all ranks.

    Rank 0 offers a name. Each rank answers under that name with a word of its own, and rank 0 repeats the
    words of all. A rank that does not find its own word there answered to an earlier life.

    Args:
        store: what all lives share.
        rank: of this process.
        size: number of ranks.
        patience: how long they may take.

    Raises:
        StateError: a rank did not come in time.
    """
    word, end = uuid4().hex, time.monotonic() + patience.total_seconds()
    if rank == 0:
        return _invite(store, word, size, patience)
    answered = ""
    while time.monotonic() < end:
        if not store.check(["life"]):
            time.sleep(LOOK_AGAIN.total_seconds() / 10)
            continue
        life = store.get("life").decode()
        if life != answered:
            store.set(f"{life}/{rank}", word)
            answered = life
        if _has(store, f"{life}/all", LOOK_AGAIN) and json.loads(store.get(f"{life}/all"))[rank] == word:
            return life
    raise StateError(f"Rank 0 did not come within {patience.total_seconds():.0f} s: its machine may be down.")


def _invite(store: Store, life: str, size: int, patience: timedelta) -> str:
    store.set("life", life)
    words = [life]
    for rank in range(1, size):
        if not _has(store, f"{life}/{rank}", patience):
            raise StateError(
                f"Rank {rank} did not come within {patience.total_seconds():.0f} s: its machine may be down."
            )
        words.append(store.get(f"{life}/{rank}").decode())
    store.set(f"{life}/all", json.dumps(words))
    return life


def _has(store: Store, key: str, patience: timedelta) -> bool:
    try:
        store.wait([key], patience)
    except DistStoreError:
        return False
    return True


def _count() -> str:
    return environ.current().get("TORCHELASTIC_RESTART_COUNT", "0")
