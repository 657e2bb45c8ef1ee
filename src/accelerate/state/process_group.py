"""Open the process group that a `Topology` describes, wait in it, and close it when the process ends.

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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from importlib import import_module
from typing import Any

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
from accelerate.devices import DeviceBackend
from accelerate.launch import LOOPBACK, hold_loopback_store, loopback_interface
from accelerate.state import hosts, restarts
from accelerate.state.store_channel import StoreChannel
from accelerate.state.topology import Topology

SECONDS_TO_CLOSE_AFTER_ERROR = 5.0
SECONDS_TO_SETTLE = 0.1

# Packages that register a communication library when imported, by its name or by the hardware it is for.
PROVIDERS = {
    "smddp": "smdistributed.dataparallel.torch.torch_smddp",
    "xla": "torch_xla.distributed.xla_backend",
    "hpu": "habana_frameworks.torch.distributed.hccl",
}
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_opened = [0]  # how many groups this process has opened; each has keys of its own in the store
while_opening: list[Callable[[Topology, int], AbstractContextManager[object]]] = []
"""Entered by each of several ranks that meet at the address of a topology, until the group is open.
The number tells apart the groups that a process opens one after the other."""
before_closing: list[Callable[[], None]] = []
"""Called before the default group is closed, in this order."""

_owner: list[int] = []  # the process that uses the group: a fork inherits the group, but must not close it


def is_open() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def open_group(topology: Topology, backend: DeviceBackend, comm: str | None = None, **kwargs: Any) -> str:
    """Open the default process group. Called on every rank, once; returns when all ranks have come.

    Args:
        topology: which process this is and where the others meet.
        backend: the hardware whose tensors travel.
        comm: name of the communication library; None is the one that suits the hardware.
        **kwargs: further arguments of `torch.distributed.init_process_group`; None counts as not given.

    Returns:
        The name of the communication library.

    Raises:
        ConfigurationError: this build of torch has no such communication library.
    """
    comm = comm or backend.comm or "gloo"
    _import_provider(comm, backend)
    _check_built(comm, backend)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    with _watched(topology, kwargs):
        _open(topology, comm, kwargs)
    return comm


def find_hosts(topology: Topology, kwargs: dict[str, Any]) -> Topology:
    """Let ranks that do not know their place on their host exchange host names. Called on every rank.

    Args:
        topology: returned as it is unless `needs_hosts` is set.
        kwargs: what `open_group` will get; the store that was opened for the exchange is put into it.

    Raises:
        StateError: a rank did not come in time.
    """
    if not topology.needs_hosts:
        return topology
    timeout = kwargs.get("timeout") or distributed_c10d.default_pg_timeout
    if is_open():
        return _exchange_hosts(topology, torch_private.default_store(), timeout)
    with _watched(topology, kwargs):
        store = kwargs.get("store") or _store_at(topology, kwargs.pop("init_method", None), timeout)
        kwargs["store"] = store
        return _exchange_hosts(topology, store, timeout)


def _store_at(topology: Topology, init_method: str | None, timeout: timedelta) -> Store:
    address = {"MASTER_ADDR": str(topology.address), "MASTER_PORT": str(topology.port)}
    environ.assign({name: text for name, text in address.items() if not environ.current().get(name)})
    opened = rendezvous(init_method or "env://", topology.rank, topology.size, timeout=timeout)
    store: Store = next(opened)[0]
    return store


def _exchange_hosts(topology: Topology, store: Store, timeout: timedelta) -> Topology:
    channel = StoreChannel(store, f"accelerate/hosts/{_opened[0]}", environ.current())
    return hosts.find_place(topology, channel, timeout)


def _watched(topology: Topology, kwargs: Mapping[str, Any]) -> ExitStack:
    """The contexts in which this rank waits for the others to open the group with it."""
    stack = ExitStack()
    if topology.size > 1 and not {"init_method", "store"} & set(kwargs):
        for watch in while_opening:
            stack.enter_context(watch(topology, _opened[0]))
    return stack


def _open(topology: Topology, comm: str, kwargs: dict[str, Any]) -> None:
    if topology.size == 1 and "init_method" not in kwargs:
        kwargs["store"] = HashStore()  # nobody else will come, so no port is needed
    else:
        missing = {
            name: text for name, text in topology.variables().items() if not environ.current().get(name)
        }
        environ.assign(missing)
        store = (
            None
            if {"init_method", "store"} & set(kwargs)
            else restarts.store_of_generation(
                topology, kwargs.get("timeout") or distributed_c10d.default_pg_timeout
            )
        )
        kwargs.update({"store": store} if store else {})
    # DistributedDataParallel imports this module; imported while a group is open, its functions would keep
    # that group as a default argument, and the threads of a closed group would never end.
    import_module("torch.distributed.nn.functional")
    _opened[0] += 1
    held = _listen_on_loopback(topology)
    dist.init_process_group(comm, rank=topology.rank, world_size=topology.size, **kwargs)
    del held  # the group keeps the store open from here on
    own_group()
    if comm == "gloo":
        # A process that ends before its peers have connected to each other would make them fail.
        dist.barrier()


def _listen_on_loopback(topology: Topology) -> object:
    """Keep what this process opens for a run on one machine from the other interfaces of the machine.

    Returns:
        What keeps the store open until the group has it; None where another process opens it.
    """
    present = environ.current()
    if topology.size == 1 or topology.local_size < topology.size or topology.address not in LOOPBACK:
        return None
    interface = loopback_interface()
    if interface and not present.get(GLOO_INTERFACE):
        environ.assign({GLOO_INTERFACE: interface})
    opens = topology.rank == 0 and present.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return hold_loopback_store(topology.address, int(topology.port or 0)) if opens else None


def own_group() -> None:
    """Take charge of the open group, whoever opened it: it is closed when this process ends."""
    _owner[:] = [os.getpid()]


def connect_channel(purpose: str, timeout: timedelta) -> StoreChannel | None:
    """Open a connection of its own to the store of the default group; None where it has no such store.

    The connection that the group uses is locked while a thread waits in it; a thread needs its own.

    Args:
        purpose: tells its keys apart from those of others.
        timeout: how long one request may take.
    """
    store = _connect() if is_open() else None
    if store is None:
        return None
    store.set_timeout(timeout)
    # The store may outlive a restart, and a group that was closed.
    return StoreChannel(
        store, f"accelerate/{purpose}/{restarts.generation()}.{_opened[0]}", environ.current()
    )


def connect_before(topology: Topology, purpose: str, timeout: timedelta) -> StoreChannel | None:
    """Open a connection to the store through which ranks are about to open the default group.

    Args:
        topology: where they meet.
        purpose: tells its keys apart from those of others.
        timeout: how long one request may take.

    Returns:
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
            connection: Store = store.clone()
            return connection
        except (RuntimeError, NotImplementedError):  # a kind of store that has one connection only
            return None
    while isinstance(store, PrefixStore):  # older torch
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def close_group(group: dist.ProcessGroup | None = None) -> None:
    """Close a process group, or the default one with all others; waits for no other process.

    Args:
        group: the group; None closes all. Nothing happens when none is open.
    """
    if is_open():
        if group is None:
            for call in before_closing:
                call()
        dist.destroy_process_group(group)
        _settle()


def _settle() -> None:
    """Give threads of gloo time to let go of the Python objects of the last operations.

    They need the interpreter for that. One that comes while the interpreter is taken down aborts the process
    after all its work is done; one that comes while a replica is deleted, which holds the last reference to
    the group and waits for its threads, hangs it.
    """
    time.sleep(SECONDS_TO_SETTLE)


_ways: list[Callable[[], None]] = []


def wait_through(function: Callable[[], None]) -> None:
    """Let `wait_for_everyone` go through a function that notes or checks the call, and then waits."""
    _ways[:] = [function]


def wait_for_everyone(device: torch.device) -> None:
    """Wait until all ranks have come here, through what `wait_through` was given.

    Args:
        device: where this process computes.

    Raises:
        StateError: the process group is closed.
    """
    if _ways and is_open():
        _ways[0]()
    else:
        wait(device)


def wait(device: torch.device) -> None:
    """Wait until all ranks of the default group have come here.

    Args:
        device: where this process computes.

    Raises:
        StateError: the group was closed, or never opened.
    """
    if is_open():
        on_device = device.index is not None and "nccl" in dist.get_backend()
        dist.barrier(device_ids=[device.index] if on_device else None)
    elif device.type == "xla":
        import_module("torch_xla.core.xla_model").rendezvous("accelerate.wait_for_everyone")
    else:
        raise StateError(
            "The processes cannot wait for each other: the process group is closed. Wait before "
            "`end_training()` or `destroy_process_group()` is called."
        )


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse arguments that `torch.distributed.init_process_group` does not have.

    Raises:
        ConfigurationError: an unknown name, or a timeout that is not a `timedelta`.
    """
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


def _import_provider(comm: str, backend: DeviceBackend) -> None:
    module = PROVIDERS.get(comm) or PROVIDERS.get(backend.name)
    if module and comm != "gloo":
        import_module(module)


def _check_built(comm: str, backend: DeviceBackend) -> None:
    names = [part.rpartition(":")[2] for part in comm.split(",")]
    missing = next((name for name in names if not dist.is_backend_available(name)), None)
    if missing is not None:
        raise wrong_value(
            "backend",
            missing,
            f"this build of torch ({torch.__version__}) cannot communicate with it on {backend.label}",
            'install a torch that can, or pass backend="gloo"',
        )


def failed() -> bool:
    """Return whether the interpreter ends because of an exception: it notes the last that nobody caught."""
    return getattr(sys, "last_type", None) is not None


def _abandon_group() -> None:
    """Close the group of a process that failed: what it still sends is given up, not finished."""
    if "nccl" in dist.get_backend():
        torch_private.abort_process_group()
    else:
        dist.destroy_process_group()


def _close_at_exit() -> None:
    if _owner != [os.getpid()]:
        return
    if is_open():
        _close_now()
    _settle()


def _close_now() -> None:
    if not failed():
        dist.destroy_process_group()
        return
    # An operation that the others never join keeps the group from closing: do not wait for it for long.
    closing = threading.Thread(target=_abandon_group, name="close-process-group", daemon=True)
    closing.start()
    closing.join(SECONDS_TO_CLOSE_AFTER_ERROR)


# Registered on import, so that what is registered later, and may still communicate, runs before.
atexit.register(_close_at_exit)
