"""Where ranks meet: the stores of a run, its process group, waiting in it, and its end.

Restart generation: how often the elastic agent has restarted this worker group. The agent keeps its store
when it restarts the ranks, with the keys of earlier generations in it, such as the addresses of processes
that have ended. A rank that reads one fails to connect, or waits without end. So the ranks of one generation
use a part of the store of their own.

A process that ends with an open group may abort in the destructors of torch's threads after all its work is
done, so the group is closed at exit, whoever forgot to. Closing waits for no other process: one that died
must not take the rest with it into a hang.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
)
from torch.distributed.rendezvous import rendezvous

from accelerate import torch_private
from accelerate.base import ConfigurationError, StateError, environ, wrong_value
from accelerate.devices import DeviceBackend, of_device
from accelerate.launch import LOOPBACK, hold_loopback_store, loopback_interface
from accelerate.state.agreement import StoreChannel, StoreConsensus, spell_absent
from accelerate.state.environments import Topology
from accelerate.state.shared import services

SECONDS_TO_CLOSE_AFTER_ERROR = 5.0
SECONDS_FOR_THREADS = 0.1
IDLE_LOOKS, IDLE_LOOKS_BEFORE_FORK = 5, 2  # in a row at which threads of torch must be idle
THREADS = Path("/proc/self/task")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
FIRST_PAUSE, GROWTH, LONGEST_PAUSE = 0.05, 1.5, 2.0
"""Seconds between two looks for the name of this generation, and by how much they grow."""

# Packages that register a communication library when imported, by its name or by the hardware it is for.
PROVIDERS = {
    "smddp": "smdistributed.dataparallel.torch.torch_smddp",
    "xla": "torch_xla.distributed.xla_backend",
    "hpu": "habana_frameworks.torch.distributed.hccl",
}


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

    Rank 0 posts a name. Each other rank posts a token of its own under that name, and rank 0 posts the token
    that it has read. A rank that does not find its token there has read the name of an earlier generation.
    """
    token, end, pause = uuid4().hex, time.monotonic() + timeout.total_seconds(), FIRST_PAUSE
    if rank == 0:
        channel.post("name", token)
        answers = channel.gather(token, range(1, size), timeout.total_seconds())
        absent = [other for other, answer in answers.items() if answer is None]
        if absent:
            raise _absent(absent[0], timeout)
        channel.post_all({f"{token}/read/{other}": answer for other, answer in answers.items()})
        return token
    answered = ""
    while time.monotonic() < end:
        name = channel.read("name")
        if name not in (None, answered):
            channel.post(f"{name}/{rank}", token)
            answered = name
        if answered and channel.read(f"{answered}/read/{rank}") == token:
            return str(answered)
        time.sleep(pause)
        pause = min(pause * GROWTH, LONGEST_PAUSE)
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
    runs = consensus.decide("host names", socket.gethostname(), _count_runs, timeout.total_seconds())
    hosts = [host for host, length in runs for _ in range(length)]
    own = hosts[topology.rank]
    local_rank, node = hosts[: topology.rank].count(own), list(dict.fromkeys(hosts)).index(own)
    local_size = hosts.count(own)
    return replace(topology, local_rank=local_rank, local_size=local_size, node=node, needs_hosts=False)


def _count_runs(hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Write each host with the number of ranks in a row that it has: all ranks read this."""
    return [(host, len(list(ranks))) for host, ranks in groupby(hosts)]


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

    What is returned keeps the store open until the group has it; None where another process opens it.
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
    store = connect_store() if is_open() else None
    if store is None:
        return None
    store.set_timeout(timeout)
    # The store may outlive a restart, and a group that was closed.
    scope = f"accelerate/{purpose}/{generation()}.{services.groups_opened}"
    return StoreChannel(store, scope, environ.current())


def connect_before(topology: Topology, purpose: str, timeout: timedelta) -> StoreChannel | None:
    """Open a connection to the store through which ranks are about to open the default group.

    None as long as no process answers there: rank 0 may be the one that keeps the store, and come late.
    """
    address, port = str(topology.address), int(topology.port or 0)
    try:  # torch's own connection would wait for an answer, and print warnings meanwhile
        socket.create_connection((address, port), timeout=timeout.total_seconds()).close()
    except OSError:
        return None
    store = TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    return StoreChannel(store, f"accelerate/{purpose}", environ.current())


def connect_store() -> Store | None:
    """Open a connection of its own to the store of the default group; None where it has no such store."""
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


def is_open() -> bool:
    return dist.is_available() and dist.is_initialized()


def open_group(topology: Topology, backend: DeviceBackend, comm: str | None = None, **kwargs: Any) -> str:
    """Open the default process group. Called on every rank, once; returns when all ranks have come.

    The name of the communication library is returned; None for `comm` is the one that suits the hardware.
    `kwargs` are further arguments of `torch.distributed.init_process_group`; None counts as not given.
    """
    comm = comm or backend.comm or "gloo"
    provider = PROVIDERS.get(comm) or PROVIDERS.get(backend.name)
    if provider and comm != "gloo":
        import_module(provider)
    names = [part.rpartition(":")[2] for part in comm.split(",")]
    for missing in (name for name in names if not dist.is_backend_available(name)):
        reason = f"this build of torch ({torch.__version__}) cannot communicate with it on {backend.label}"
        raise wrong_value("backend", missing, reason, 'install a torch that can, or pass backend="gloo"')
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    with _watched(topology, kwargs):
        _open(topology, comm, kwargs)
    return comm


def find_hosts(topology: Topology, kwargs: dict[str, Any]) -> Topology:
    """Let ranks that do not know their place on their host exchange host names. Called on every rank.

    The store that is opened for it is put into `kwargs`, which `open_group` will get.
    """
    if not topology.needs_hosts:
        return topology
    timeout = kwargs.get("timeout") or distributed_c10d.default_pg_timeout
    if is_open():
        return exchange_hosts(topology, torch_private.default_store(), timeout)
    with _watched(topology, kwargs):
        if not kwargs.get("store"):
            kwargs["store"] = open_store(topology, kwargs.pop("init_method", None), timeout)
        return exchange_hosts(topology, kwargs["store"], timeout)


def _watched(topology: Topology, kwargs: Mapping[str, Any]) -> ExitStack:
    """The contexts in which this rank waits for the others to open the group with it."""
    stack = ExitStack()
    if topology.size > 1 and not {"init_method", "store"} & set(kwargs):
        for watch in services.while_opening:
            stack.enter_context(watch(topology, services.groups_opened))
    return stack


def _open(topology: Topology, comm: str, kwargs: dict[str, Any]) -> None:
    if topology.size == 1 and "init_method" not in kwargs:
        kwargs["store"] = HashStore()  # no other rank will join, so no port is needed
    else:
        assign_missing(topology.variables())
        if not {"init_method", "store"} & set(kwargs):
            timeout = kwargs.get("timeout") or distributed_c10d.default_pg_timeout
            store = store_of_generation(topology, timeout)
            kwargs.update({"store": store} if store else {})
    # DistributedDataParallel imports this module; imported while a group is open, its functions would keep
    # that group as a default argument, and the threads of a closed group would never end.
    import_module("torch.distributed.nn.functional")
    services.groups_opened += 1
    held = listen_on_loopback(topology)
    dist.init_process_group(comm, rank=topology.rank, world_size=topology.size, **kwargs)
    del held  # the group keeps the store open from here on
    services.own_group()
    if comm == "gloo":
        # A process that ends before its peers have connected to each other would make them fail.
        dist.barrier()


def close_group(group: dist.ProcessGroup | None = None) -> None:
    """Close a process group where it is open, or the default one with all others; waits for no process."""
    if not is_open():
        return
    if group is None:
        services.before_close()
    _destroy(group)


def _destroy(group: dist.ProcessGroup | None = None) -> None:
    # A thread of gloo that released the last reference would wait for itself, and abort the process.
    held = group or dist.group.WORLD
    dist.destroy_process_group(group)
    _wait_for_threads()
    del held


def _wait_for_threads() -> None:
    """Give threads of gloo time to let go of the Python objects of the last operations.

    They need the interpreter for that. One that comes while the interpreter is taken down aborts the process
    after all its work is done; one that comes while a replica is deleted, which holds the last reference to
    the group and waits for its threads, hangs it. One that waits for the interpreter gets it during a pause.
    """
    if THREADS.exists():
        _wait_until_idle(IDLE_LOOKS, pause=0.002, limit=10 * SECONDS_FOR_THREADS)
    else:
        time.sleep(SECONDS_FOR_THREADS)


def _wait_before_fork() -> None:
    """Wait until the threads of torch are idle.

    After a collective one of them releases its tensors and acquires the interpreter for that. A process that
    is forked at that moment inherits a locked lock of the interpreter and deadlocks: the worker of a loader
    would never return a batch. Since Python 3.12 a forked process initializes that lock again.
    """
    if is_open():
        _wait_until_idle(IDLE_LOOKS_BEFORE_FORK, pause=0.0005, limit=SECONDS_FOR_THREADS)


def _wait_until_idle(looks: int, pause: float, limit: float) -> None:
    """Pause until the threads of torch were idle at so many looks in a row, at most `limit` seconds.

    A thread that waits for the interpreter looks idle, and gets it in the pause before each look.
    """
    deadline, idle = time.monotonic() + limit, 0
    while idle < looks and time.monotonic() < deadline:
        time.sleep(pause)
        idle = 0 if _torch_threads_run() else idle + 1


def _torch_threads_run() -> bool:
    for thread in THREADS.iterdir():
        with suppress(OSError):  # it has ended
            name, _, state = (thread / "stat").read_text("latin-1").partition("(")[2].rpartition(") ")
            if name.startswith("pt_") and not state.startswith("S"):
                return True
    return False


def wait(device: torch.device) -> None:
    """Wait until all ranks of the default group have come here; refused where the group is closed."""
    if is_open():
        # Without the index, torch warns where it has not been given with the group.
        on_device = device.index is not None and dist.get_backend() != "gloo"
        dist.barrier(device_ids=[device.index] if on_device else None)
    elif of_device(device).own_runtime:
        import_module("torch_xla.core.xla_model").rendezvous("accelerate.wait_for_everyone")
    else:
        raise StateError(
            "The processes cannot wait for each other: the process group is closed. Wait before "
            "`end_training()` or `destroy_process_group()` is called."
        )


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse arguments that `torch.distributed.init_process_group` does not have."""
    import inspect

    known = set(inspect.signature(dist.init_process_group).parameters) - {"rank", "world_size"}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise ConfigurationError(
            f"Unknown arguments {', '.join(unknown)}: the process group takes {', '.join(sorted(known))}."
        )
    timeout = kwargs.get("timeout")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise wrong_value("timeout", timeout, "not a datetime.timedelta", "write timedelta(seconds=...)")


def failed() -> bool:
    """Return whether the interpreter ends because of an exception: it stores the last uncaught one."""
    return getattr(sys, "last_type", None) is not None


def _close_at_exit() -> None:
    if services.group_owner != os.getpid():
        return
    services.before_close()
    if not is_open():
        _wait_for_threads()
    elif not failed():
        _destroy()
    else:
        # What this process still sends is given up. An operation that the others never join keeps the group
        # from closing: do not wait for it for long.
        has_nccl = "nccl" in dist.get_backend()
        close = torch_private.abort_process_group if has_nccl else dist.destroy_process_group
        closing = threading.Thread(target=close, name="close-process-group", daemon=True)
        closing.start()
        closing.join(SECONDS_TO_CLOSE_AFTER_ERROR)
        _wait_for_threads()


# Registered on import, so that what is registered later, and may still communicate, runs before.
atexit.register(_close_at_exit)
if sys.version_info < (3, 12) and hasattr(os, "register_at_fork") and THREADS.exists():
    os.register_at_fork(before=_wait_before_fork)
