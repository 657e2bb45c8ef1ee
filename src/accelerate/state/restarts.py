"""Restart generation: how often the elastic agent has restarted this worker group.

The agent keeps its store when it restarts the ranks, with the keys of earlier generations in it, such as the
addresses of processes that have ended. A rank that reads one fails to connect, or waits without end. So the
ranks of one generation use a part of the store of their own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from accelerate.base import StateError, environ
from accelerate.state.store_channel import StoreChannel
from accelerate.state.topology import Topology

LOOK_AGAIN = 0.5
"""Seconds that a rank waits for the others before it looks whether another generation has begun."""

_generation: list[str] = []


def generation() -> str:
    """Return the name of this generation: the same on all ranks that use the same part of the store."""
    return _generation[0] if _generation else _restart_count()


def store_of_generation(topology: Topology, timeout: timedelta) -> Store | None:
    """Connect to the part of the agent's store that this generation uses. Called on all ranks.

    Args:
        topology: which process this is and where the others meet.
        timeout: how long the ranks may take to come together.

    Returns:
        The store; None where no store outlives a restart, or nothing was restarted yet.

    Raises:
        StateError: a rank did not come in time.
    """
    _generation.clear()
    if environ.current().get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    on_one_machine = topology.local_size == topology.size
    if on_one_machine and _restart_count() == "0":
        return None
    store = TCPStore(
        str(topology.address), int(topology.port or 0), None, False, timeout, wait_for_workers=False
    )
    # Agents of several machines count restarts on their own: their ranks have to agree.
    if on_one_machine:
        name = _restart_count()
    else:
        channel = StoreChannel(store, "generation", environ.current())
        name = agree_on_generation(channel, topology.rank, topology.size, timeout)
    _generation[:] = [name]
    return PrefixStore(f"generation_{name}", store)


def agree_on_generation(channel: StoreChannel, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of one generation get, and no others. Called on all ranks.

    Rank 0 posts a name. Each other rank posts a token of its own under that name, and rank 0 posts the tokens
    of all ranks. A rank that does not find its token there has read the name of an earlier generation.

    Args:
        channel: a part of the store that all generations share.
        rank: of this process.
        size: number of ranks.
        timeout: how long they may take.

    Raises:
        StateError: a rank did not come in time.
    """
    token, end = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _offer(channel, token, size, timeout)
    answered = ""
    while time.monotonic() < end:
        name = channel.wait(["name"], LOOK_AGAIN)["name"]
        if name is None:
            continue
        if name != answered:
            channel.post(f"{name}/{rank}", token)
            answered = name
        tokens = channel.wait([f"{name}/all"], LOOK_AGAIN)[f"{name}/all"]
        if isinstance(tokens, list) and tokens[rank:][:1] == [token]:
            return str(name)
    raise _absent(0, timeout)


def _offer(channel: StoreChannel, name: str, size: int, timeout: timedelta) -> str:
    channel.post("name", name)
    answers = channel.wait([f"{name}/{rank}" for rank in range(1, size)], timeout.total_seconds())
    tokens = [name, *answers.values()]
    if None in tokens:
        raise _absent(tokens.index(None), timeout)
    channel.post(f"{name}/all", tokens)
    return name


def _absent(rank: int, timeout: timedelta) -> StateError:
    return StateError(
        f"Rank {rank} did not come within {timeout.total_seconds():.0f} s: its machine may be down."
    )


def _restart_count() -> str:
    return environ.current().get("TORCHELASTIC_RESTART_COUNT", "0")
