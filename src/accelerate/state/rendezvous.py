"""The stores through which ranks meet: restart generations, host names, connections of their own.

Restart generation: how often the elastic agent has restarted this worker group. The agent keeps its store
when it restarts the ranks, with the keys of earlier generations in it, such as the addresses of processes
that have ended. A rank that reads one fails to connect, or waits without end. So the ranks of one generation
use a part of the store of their own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from accelerate import torch_private
from accelerate.base import StateError, environ
from accelerate.launch import LOOPBACK, hold_loopback_store, loopback_interface
from accelerate.state.agreement import StoreChannel, StoreConsensus, spell_absent
from accelerate.state.environments import Topology
from accelerate.state.shared import services

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOK_AGAIN = 0.5
"""Seconds that a rank waits for the others before it looks whether another generation has begun."""


def generation() -> str:
    """Return the name of this generation: the same on all ranks that use the same part of the store."""
    return services.generation or _restart_count()


def store_of_generation(topology: Topology, timeout: timedelta) -> Store | None:
    """Connect to the part of the agent's store that this generation uses. Called on all ranks.

    None where no store outlives a restart, or nothing was restarted yet.
    """
    services.generation = None
    if environ.current().get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    on_one_machine, name = topology.local_size == topology.size, _restart_count()
    if on_one_machine and name == "0":
        return None
    address, port = str(topology.address), int(topology.port or 0)
    store = TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    if not on_one_machine:  # their agents count restarts on their own: the ranks have to agree
        channel = StoreChannel(store, "generation", environ.current())
        name = agree_on_generation(channel, topology.rank, topology.size, timeout)
    services.generation = name
    return PrefixStore(f"generation_{name}", store)


def agree_on_generation(channel: StoreChannel, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of one generation get, and no others. Called on all ranks.

    Rank 0 posts a name. Each other rank posts a token of its own under that name, and rank 0 posts the tokens
    of all ranks. A rank that does not find its token there has read the name of an earlier generation.
    """
    token, end = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        channel.post("name", token)
        answers = channel.gather(token, range(1, size), timeout.total_seconds())
        tokens = [token, *answers.values()]
        if None in tokens:
            raise _absent(tokens.index(None), timeout)
        channel.post(f"{token}/all", tokens)
        return token
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


def _absent(rank: int, timeout: timedelta) -> StateError:
    absent = spell_absent([rank], round(timeout.total_seconds()), "Rank")
    return StateError(f"{absent}: its machine may be down.")


def _restart_count() -> str:
    return environ.current().get("TORCHELASTIC_RESTART_COUNT", "0")


def exchange_hosts(topology: Topology, store: Store, timeout: timedelta) -> Topology:
    """Complete a topology with the local rank, from the host names of all ranks. Called on all ranks.

    Ranks of one host count from 0 in the order of their ranks; hosts count from 0 in the order of their first
    ranks. All ranks reach the store.
    """
    channel = StoreChannel(store, f"accelerate/hosts/{services.groups_opened}", environ.current())
    consensus = StoreConsensus(channel, topology.rank, topology.size, _describe_absent_hosts)
    hosts = consensus.decide("host names", socket.gethostname(), list, timeout.total_seconds())
    own = hosts[topology.rank]
    local_rank, node = hosts[: topology.rank].count(own), list(dict.fromkeys(hosts)).index(own)
    local_size = hosts.count(own)
    return replace(topology, local_rank=local_rank, local_size=local_size, node=node, needs_hosts=False)


def _describe_absent_hosts(what: str, ranks: Sequence[int], seconds: float) -> str:
    return (
        f"{spell_absent(ranks, round(seconds), 'Rank')} to exchange {what}. See the output there; set "
        "LOCAL_RANK and LOCAL_WORLD_SIZE on every rank where host names should not be exchanged."
    )


def assign_missing(variables: Mapping[str, str]) -> None:
    """Set those variables of this process that have no value."""
    present = environ.current()
    environ.assign({name: text for name, text in variables.items() if not present.get(name)})


def open_store(topology: Topology, init_method: str | None, timeout: timedelta) -> Store:
    """Open the store through which ranks meet, before the group."""
    assign_missing({"MASTER_ADDR": str(topology.address), "MASTER_PORT": str(topology.port)})
    opened = rendezvous(init_method or "env://", topology.rank, topology.size, timeout=timeout)
    return next(opened)[0]  # type: ignore[no-any-return]


def listen_on_loopback(topology: Topology) -> object:
    """Keep what this process opens for a run on one machine from the other interfaces of the machine.

    Returns:
        What keeps the store open until the group has it; None where another process opens it.
    """
    if topology.size == 1 or topology.local_size < topology.size or topology.address not in LOOPBACK:
        return None
    interface = loopback_interface()
    if interface:
        assign_missing({GLOO_INTERFACE: interface})
    opens = topology.rank == 0 and environ.current().get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return hold_loopback_store(topology.address, int(topology.port or 0)) if opens else None


def connect_channel(purpose: str, timeout: timedelta) -> StoreChannel | None:
    """Open a connection of its own to the store of the default group; None where it has no such store.

    The connection that the group uses is locked while a thread waits in it; a thread needs its own. A
    request may take as long as `timeout`.
    """
    store = _connect() if dist.is_available() and dist.is_initialized() else None
    if store is None:
        return None
    store.set_timeout(timeout)
    # The store may outlive a restart, and a group that was closed.
    scope = f"accelerate/{purpose}/{generation()}.{services.groups_opened}"
    return StoreChannel(store, scope, environ.current())


def connect_before(topology: Topology, purpose: str, timeout: timedelta) -> StoreChannel | None:
    """Open a connection to the store through which ranks are about to open the default group.

    None as long as nobody answers there: rank 0 may be the one that keeps the store, and come late.
    """
    address, port = str(topology.address), int(topology.port or 0)
    try:  # torch's own connection would wait for an answer, and print warnings meanwhile
        socket.create_connection((address, port), timeout=timeout.total_seconds()).close()
    except OSError:
        return None
    store = TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    return StoreChannel(store, f"accelerate/{purpose}", environ.current())


def _connect() -> Store | None:
    store: Any = torch_private.default_store()
    if hasattr(store, "clone"):
        try:
            return store.clone()  # type: ignore[no-any-return]
        except (RuntimeError, NotImplementedError):  # a kind of store that has one connection only
            return None
    while isinstance(store, PrefixStore):  # older torch
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
