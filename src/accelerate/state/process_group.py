"""Open the process group that a `Topology` describes, wait in it, and close it when the process ends.

A process that ends with an open group may abort in the destructors of torch's threads after all its work is
done, so the group is closed at exit, whoever forgot to. Closing waits for no other process: one that died
must not take the rest with it into a hang.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]

from accelerate import torch_private
from accelerate.base import ConfigurationError, StateError, wrong_value
from accelerate.devices import DeviceBackend, of_device
from accelerate.state import rendezvous
from accelerate.state.environments import Topology
from accelerate.state.shared import services

SECONDS_TO_CLOSE_AFTER_ERROR = 5.0
SECONDS_FOR_THREADS = 0.1

# Packages that register a communication library when imported, by its name or by the hardware it is for.
PROVIDERS = {
    "smddp": "smdistributed.dataparallel.torch.torch_smddp",
    "xla": "torch_xla.distributed.xla_backend",
    "hpu": "habana_frameworks.torch.distributed.hccl",
}


def is_open() -> bool:
    return dist.is_available() and dist.is_initialized()


def open_group(topology: Topology, backend: DeviceBackend, comm: str | None = None, **kwargs: Any) -> str:
    """Open the default process group. Called on every rank, once; returns when all ranks have come.

    Args:
        topology: which process this is and where the others meet.
        backend: the hardware whose tensors are sent.
        comm: name of the communication library, which is returned; None is the one that suits the hardware.
        **kwargs: further arguments of `torch.distributed.init_process_group`; None counts as not given.
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
    timeout = _timeout(kwargs)
    if is_open():
        return rendezvous.exchange_hosts(topology, torch_private.default_store(), timeout)
    with _watched(topology, kwargs):
        if not kwargs.get("store"):
            kwargs["store"] = rendezvous.open_store(topology, kwargs.pop("init_method", None), timeout)
        return rendezvous.exchange_hosts(topology, kwargs["store"], timeout)


def _timeout(kwargs: Mapping[str, Any]) -> timedelta:
    return kwargs.get("timeout") or distributed_c10d.default_pg_timeout


def _watched(topology: Topology, kwargs: Mapping[str, Any]) -> ExitStack:
    """The contexts in which this rank waits for the others to open the group with it."""
    stack = ExitStack()
    if topology.size > 1 and not {"init_method", "store"} & set(kwargs):
        for watch in services.while_opening:
            stack.enter_context(watch(topology, services.groups_opened))
    return stack


def _open(topology: Topology, comm: str, kwargs: dict[str, Any]) -> None:
    if topology.size == 1 and "init_method" not in kwargs:
        kwargs["store"] = HashStore()  # nobody else will come, so no port is needed
    else:
        rendezvous.assign_missing(topology.variables())
        if not {"init_method", "store"} & set(kwargs):
            store = rendezvous.store_of_generation(topology, _timeout(kwargs))
            kwargs.update({"store": store} if store else {})
    # DistributedDataParallel imports this module; imported while a group is open, its functions would keep
    # that group as a default argument, and the threads of a closed group would never end.
    import_module("torch.distributed.nn.functional")
    services.groups_opened += 1
    held = rendezvous.listen_on_loopback(topology)
    dist.init_process_group(comm, rank=topology.rank, world_size=topology.size, **kwargs)
    del held  # the group keeps the store open from here on
    own_group()
    if comm == "gloo":
        # A process that ends before its peers have connected to each other would make them fail.
        dist.barrier()


def own_group() -> None:
    """Take charge of the open group, whoever opened it: it is closed when this process ends."""
    services.own_group(os.getpid())


def close_group(group: dist.ProcessGroup | None = None) -> None:
    """Close a process group where it is open, or the default one with all others; waits for no process."""
    if not is_open():
        return
    if group is None:
        services.before_close()
    # A thread of gloo that released the last reference would wait for itself, and abort the process.
    held = group or dist.group.WORLD
    dist.destroy_process_group(group)
    _wait_for_threads()
    del held


def _wait_for_threads() -> None:
    """Give threads of gloo time to let go of the Python objects of the last operations.

    They need the interpreter for that. One that comes while the interpreter is taken down aborts the process
    after all its work is done; one that comes while a replica is deleted, which holds the last reference to
    the group and waits for its threads, hangs it.
    """
    time.sleep(SECONDS_FOR_THREADS)


def wait(device: torch.device) -> None:
    """Wait until all ranks of the default group have come here; refused where the group is closed."""
    if is_open():
        on_device = device.index is not None and "nccl" in dist.get_backend()
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
    """Return whether the interpreter ends because of an exception: it notes the last that nobody caught."""
    return getattr(sys, "last_type", None) is not None


def _close_at_exit() -> None:
    if services.group_owner != os.getpid():
        return
    if is_open() and not failed():
        dist.destroy_process_group()
    elif is_open():
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
