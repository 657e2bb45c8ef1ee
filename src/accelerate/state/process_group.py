"""Opening, barrier and closing of the default process group, and connections to its store.

`PartialState` opens the group, and the hang watcher, checkpointing and other threads connect to its store.

The restart generation is the number of times that the elastic agent has restarted this worker group. The
agent keeps its store when it restarts the ranks, with the keys of earlier generations, such as addresses of
processes that have ended. A rank that reads such an address fails to connect or waits without end. Therefore
the ranks of each generation use a separate prefix of the store.

A process that ends with an open group may abort in the destructors of torch's threads after all its work is
done. Therefore the group is closed at exit. Closing does not wait for other ranks, because a rank that died
must not make the others hang.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import warnings
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
from accelerate.state.agreement import StoreChannel, StoreConsensus, format_absent_ranks
from accelerate.state.environments import Topology
from accelerate.state.shared import services

TIMEOUT_AFTER_ERROR = 5.0  # seconds to close the group after an uncaught exception
THREADS_TIMEOUT = 0.1  # seconds for threads of torch to become idle
IDLE_POLLS, IDLE_POLLS_BEFORE_FORK = 5, 2  # consecutive polls that must find the threads of torch idle
TASKS_FOLDER = Path("/proc/self/task")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
MIN_POLL_INTERVAL, POLL_GROWTH, MAX_POLL_INTERVAL = 0.05, 1.5, 2.0
"""Seconds between two polls for the name of this generation, and the factor by which they increase."""

# Modules whose import registers a backend of torch.distributed, by the name of the backend or the hardware.
BACKEND_MODULES = {
    "smddp": "smdistributed.dataparallel.torch.torch_smddp",
    "xla": "torch_xla.distributed.xla_backend",
    "hpu": "habana_frameworks.torch.distributed.hccl",
}


def generation() -> str:
    """Returns the name of this restart generation, which is the same on all its ranks.

    The agents of an elastic run count their restarts independently, and each generation has its own store.
    """
    return services.generation or (_restart_count() if _uses_agent_store() else "0")


def store_of_generation(topology: Topology, timeout: timedelta) -> Store | None:
    """Connects to the store of the elastic agent under the prefix of this generation.

    Called on all ranks. Returns None if the store does not outlive a restart, or if there was no restart on a
    single node.
    """
    services.generation = None
    if not _uses_agent_store():
        return None
    on_one_node, name = topology.local_size == topology.size, _restart_count()
    if on_one_node and name == "0":
        return None
    address, port = str(topology.address), int(topology.port or 0)
    store = TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    if not on_one_node:  # each agent counts its own restarts, so the ranks have to agree
        channel = StoreChannel(store, "generation", environ.current())
        name = agree_on_generation(channel, topology.rank, topology.size, timeout)
    services.generation = name
    return PrefixStore(f"generation_{name}", store)


def agree_on_generation(channel: StoreChannel, rank: int, size: int, timeout: timedelta) -> str:
    """Returns a name that only the ranks of this generation get.

    Called on all ranks. Rank 0 writes a name. Each other rank writes a token under that name, and rank 0
    writes back the token that it has read. A rank that does not find its token has read the name of an
    earlier generation.
    """
    token, end, pause = uuid4().hex, time.monotonic() + timeout.total_seconds(), MIN_POLL_INTERVAL
    if rank == 0:
        channel.post("name", token)
        tokens = channel.gather(token, range(1, size), timeout.total_seconds())
        absent = [other for other, received in tokens.items() if received is None]
        if absent:
            raise _absent_error(absent[0], timeout)
        channel.post_all({f"{token}/read/{other}": received for other, received in tokens.items()})
        return token
    last_name = ""
    while time.monotonic() < end:
        name = channel.read("name")
        if name not in (None, last_name):
            channel.post(f"{name}/{rank}", token)
            last_name = name
        if last_name and channel.read(f"{last_name}/read/{rank}") == token:
            return str(last_name)
        time.sleep(pause)
        pause = min(pause * POLL_GROWTH, MAX_POLL_INTERVAL)
    raise _absent_error(0, timeout)


def _absent_error(rank: int, timeout: timedelta) -> StateError:
    absent = format_absent_ranks([rank], round(timeout.total_seconds()), "Rank")
    return StateError(f"{absent}: its node may be down.")


def _uses_agent_store() -> bool:
    return environ.current().get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restart_count() -> str:
    return environ.current().get("TORCHELASTIC_RESTART_COUNT", "0")


def exchange_hosts(topology: Topology, store: Store, timeout: timedelta) -> Topology:
    """Adds the local rank and the node to a topology, from the host names of all ranks.

    Called on all ranks, which are connected to the store. Local ranks are numbered in the order of the ranks
    of one host, and nodes in the order of their first ranks.
    """
    channel = StoreChannel(store, f"accelerate/hosts/{services.groups_opened}", environ.current())
    consensus = StoreConsensus(channel, topology.rank, topology.size, _format_absent_hosts)
    runs = consensus.decide("host names", socket.gethostname(), _count_runs, timeout.total_seconds())
    hosts = [host for host, length in runs for _ in range(length)]
    own = hosts[topology.rank]
    local_rank, node = hosts[: topology.rank].count(own), list(dict.fromkeys(hosts)).index(own)
    local_size = hosts.count(own)
    return replace(topology, local_rank=local_rank, local_size=local_size, node=node, needs_hosts=False)


def _count_runs(hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the run-length encoding of the host names of all ranks, which all ranks read."""
    return [(host, len(list(ranks))) for host, ranks in groupby(hosts)]


def _format_absent_hosts(operation: str, ranks: Sequence[int], seconds: float) -> str:
    return (
        f"{format_absent_ranks(ranks, round(seconds), 'Rank')} to exchange {operation}. See the output "
        "there; set LOCAL_RANK and LOCAL_WORLD_SIZE on every rank where host names should not be exchanged."
    )


def assign_missing(variables: Mapping[str, str]) -> None:
    """Sets the environment variables that have no value."""
    present = environ.current()
    environ.assign({name: text for name, text in variables.items() if not present.get(name)})


def open_store(topology: Topology, init_method: str | None, timeout: timedelta) -> Store:
    """Opens the store of the rendezvous, before the process group."""
    assign_missing({"MASTER_ADDR": str(topology.address), "MASTER_PORT": str(topology.port)})
    opened = rendezvous(init_method or "env://", topology.rank, topology.size, timeout=timeout)
    return next(opened)[0]  # type: ignore[no-any-return]


def listen_on_loopback(topology: Topology) -> object:
    """Restricts the sockets of a run on one node to the loopback interface.

    Returns an object that keeps the store open until the process group uses it, or None if another process
    opens the store.
    """
    if topology.size == 1 or topology.local_size < topology.size or topology.address not in LOOPBACK:
        return None
    interface = loopback_interface()
    if interface:
        assign_missing({GLOO_INTERFACE: interface})
    opens = topology.rank == 0 and environ.current().get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return hold_loopback_store(topology.address, int(topology.port or 0)) if opens else None


def connect_channel(purpose: str, timeout: timedelta) -> StoreChannel | None:
    """Opens a separate connection to the store of the default group, or returns None without a store.

    A thread needs its own connection, because the one of the group is locked while a thread waits in it.

    Args:
        purpose: Prefix of the names.
        timeout: Timeout of one request.
    """
    store = connect_store() if is_open() else None
    if store is None:
        return None
    store.set_timeout(timeout)
    # The store may outlive a restart and a closed group.
    scope = f"accelerate/{purpose}/{generation()}.{services.groups_opened}"
    return StoreChannel(store, scope, environ.current())


def connect_before(topology: Topology, purpose: str, timeout: timedelta) -> StoreChannel | None:
    """Opens a connection to the store of the default group while ranks still wait for that group.

    Returns None while no process serves the store, for example before a late rank 0 has opened it.
    """
    address, port = str(topology.address), int(topology.port or 0)
    try:  # the connection of torch would wait for the server, and print warnings
        socket.create_connection((address, port), timeout=timeout.total_seconds()).close()
    except OSError:
        return None
    store = TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    return StoreChannel(store, f"accelerate/{purpose}", environ.current())


def connect_store() -> Store | None:
    """Opens a separate connection to the store of the default group, or returns None if it supports none."""
    store: Any = torch_private.default_store()
    if hasattr(store, "clone"):
        try:
            return store.clone()  # type: ignore[no-any-return]
        except (RuntimeError, NotImplementedError):  # a store with a single connection
            return None
    while isinstance(store, PrefixStore):  # older torch
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def is_open() -> bool:
    """Returns whether the default process group is open."""
    return dist.is_available() and dist.is_initialized()


def open_group(topology: Topology, backend: DeviceBackend, comm: str | None = None, **kwargs: Any) -> str:
    """Opens the default process group, and returns the name of its backend.

    Called once on each rank. Returns after all ranks have called it.

    Args:
        comm: Name of the backend, such as "nccl". None is the default of the hardware.
        kwargs: Further arguments of `torch.distributed.init_process_group`, of which None is the same as no
            argument.
    """
    comm = comm or backend.comm or "gloo"
    provider = BACKEND_MODULES.get(comm) or BACKEND_MODULES.get(backend.name)
    if provider and comm != "gloo":
        import_module(provider)
    names = [part.rpartition(":")[2] for part in comm.split(",")]
    for missing in (name for name in names if not dist.is_backend_available(name)):
        reason = f"this build of torch ({torch.__version__}) cannot communicate with it on {backend.label}"
        raise wrong_value("backend", missing, reason, 'install a torch that can, or pass backend="gloo"')
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    with _opening_contexts(topology, kwargs):
        _open(topology, comm, kwargs)
    return comm


def find_hosts(topology: Topology, kwargs: dict[str, Any]) -> Topology:
    """Exchanges host names if the local rank is not known, and returns the complete topology.

    Called on all ranks. A store that is opened for this is added to `kwargs`, the arguments of `open_group`.
    """
    if not topology.needs_hosts:
        return topology
    timeout = kwargs.get("timeout") or distributed_c10d.default_pg_timeout
    if is_open():
        return exchange_hosts(topology, torch_private.default_store(), timeout)
    with _opening_contexts(topology, kwargs):
        if not kwargs.get("store"):
            kwargs["store"] = open_store(topology, kwargs.pop("init_method", None), timeout)
        return exchange_hosts(topology, kwargs["store"], timeout)


def set_timeout(timeout: timedelta) -> None:
    """Sets the timeout of the default group, if it is open.

    Gives a warning if torch cannot set it.
    """
    if not is_open():
        return
    check_arguments({"timeout": timeout})
    # Public since torch 2.15
    set_group_timeout: Any = getattr(dist, "set_timeout", None) or torch_private.set_group_timeout
    with warnings.catch_warnings(record=True) as caught:  # torch warns of other backends
        warnings.simplefilter("always")
        if set_group_timeout is not None:
            set_group_timeout(timeout)
    if set_group_timeout is None or caught:
        warnings.warn(
            f"timeout={timeout} is not used: the process group is open, and torch cannot change the timeout "
            f"of the backend {dist.get_backend()}. Pass the timeout to the call that opens the group.",
            stacklevel=3,
        )


def _opening_contexts(topology: Topology, kwargs: Mapping[str, Any]) -> ExitStack:
    """Enters the registered contexts for the time in which this rank waits for the other ranks."""
    stack = ExitStack()
    if topology.size > 1 and not {"init_method", "store"} & set(kwargs):
        for context in services.while_opening:
            stack.enter_context(context(topology, services.groups_opened))
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
    # DistributedDataParallel imports this module. If it were imported while a group is open, its functions
    # would keep that group as a default argument, and the threads of the closed group would never end.
    import_module("torch.distributed.nn.functional")
    services.groups_opened += 1
    store_server = listen_on_loopback(topology)
    dist.init_process_group(comm, rank=topology.rank, world_size=topology.size, **kwargs)
    del store_server  # the group keeps the store open from here on
    services.own_group()
    if comm == "gloo":
        # A process that ends before the other ranks have connected to each other would make them fail.
        dist.barrier()


def close_group(group: dist.ProcessGroup | None = None) -> None:
    """Closes a process group, or all groups with the default one, without waiting for other ranks.

    Does nothing if the default group is not open.
    """
    if not is_open():
        return
    if group is None:
        services.before_close()
    _destroy(group)


def _destroy(group: dist.ProcessGroup | None = None) -> None:
    # A thread of gloo that releases the last reference would wait for itself, and abort the process.
    references = [group] if group is not None else [dist.group.WORLD, *torch_private.open_groups()]
    dist.destroy_process_group(group)
    _wait_for_threads()
    del references


def _wait_for_threads() -> None:
    """Waits until threads of gloo have released the Python objects of the last operations.

    They need the GIL for that. A thread that acquires it while the interpreter finalizes aborts the process
    after all its work is done. A thread that acquires it while a `DistributedDataParallel` module is deleted,
    which has the last reference to the group and waits for its threads, hangs the process. A thread that
    waits for the GIL gets it during a pause.
    """
    if TASKS_FOLDER.exists():
        _wait_until_idle(IDLE_POLLS, pause=0.002, limit=10 * THREADS_TIMEOUT)
    else:
        time.sleep(THREADS_TIMEOUT)


def _wait_before_fork() -> None:
    """Waits until the threads of torch are idle.

    After a collective one of them releases its tensors, and acquires the GIL for that. A process that is
    forked at that moment inherits a locked mutex of the interpreter and deadlocks, so a DataLoader worker
    would never return a batch. Since Python 3.12 a forked process initializes that mutex again.
    """
    if is_open():
        _wait_until_idle(IDLE_POLLS_BEFORE_FORK, pause=0.0005, limit=THREADS_TIMEOUT)


def _wait_until_idle(polls: int, pause: float, limit: float) -> None:
    """Waits until the threads of torch are idle in consecutive polls.

    A thread that waits for the GIL appears idle, and gets the GIL in the pause before each poll.

    Args:
        pause: Seconds before each poll.
        limit: Timeout in seconds.
    """
    deadline, idle = time.monotonic() + limit, 0
    while idle < polls and time.monotonic() < deadline:
        time.sleep(pause)
        idle = 0 if _torch_threads_run() else idle + 1


def _torch_threads_run() -> bool:
    for thread in TASKS_FOLDER.iterdir():
        with suppress(OSError):  # the thread has ended
            name, _, state = (thread / "stat").read_text("latin-1").partition("(")[2].rpartition(") ")
            if name.startswith("pt_") and not state.startswith("S"):
                return True
    return False


def wait(device: torch.device) -> None:
    """Waits until all ranks of the default group have called this, or raises an error if it is closed."""
    if is_open():
        # Without the index, torch warns unless the group was opened with a device.
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
    """Raises an error for arguments that `torch.distributed.init_process_group` does not have."""
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
    """Returns whether the interpreter exits because of an uncaught exception."""
    return getattr(sys, "last_type", None) is not None


def _close_at_exit() -> None:
    if services.group_owner != os.getpid():
        if services.closing_process == os.getpid():
            services.before_close()
        return
    services.before_close()
    if not is_open():
        _wait_for_threads()
    elif not failed():
        _destroy()
    else:
        # Pending operations are abandoned. One that the other ranks never join would keep the group from
        # closing, so the wait has a timeout.
        has_nccl = "nccl" in dist.get_backend()
        close = torch_private.abort_process_group if has_nccl else dist.destroy_process_group
        closing = threading.Thread(target=close, name="close-process-group", daemon=True)
        closing.start()
        closing.join(TIMEOUT_AFTER_ERROR)
        _wait_for_threads()


# Registered at import, so that handlers that are registered later, and may communicate, run before it.
atexit.register(_close_at_exit)
if sys.version_info < (3, 12) and hasattr(os, "register_at_fork") and TASKS_FOLDER.exists():
    os.register_at_fork(before=_wait_before_fork)
