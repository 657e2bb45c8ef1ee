"""Ports of this machine, the store on its loopback interface, and whether machine 0 can be reached."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from accelerate.base import LaunchError

if TYPE_CHECKING:
    from accelerate.launch.plan import LaunchPlan

DEFAULT_PORT = 29500


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether another program of this machine listens on a port.

    Args:
        port: default 29500.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port or DEFAULT_PORT)))
        except OSError:
            return True
    return False


def get_free_port() -> int:
    """Any port that nobody uses at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


KEY_VARIABLE = "ACCELERATE_RUN_KEY"
"""Secret of one run, with which its ranks sign what they write to the store."""

LOOPBACK = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6, "localhost": socket.AF_INET}
BACKLOG = 4096


def run_key(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the key of a run: that of the environment, or a new one.

    Args:
        environ: variables of this process; a launcher that was started by another one finds the key there.
    """
    return {KEY_VARIABLE: environ.get(KEY_VARIABLE) or os.urandom(32).hex()}


def hold_loopback_store(address: str, port: int) -> object:
    """Open a store of `torch.distributed` that listens on the loopback interface alone.

    By default torch listens on all interfaces. A `TCPStore` that this process opens later at the same port
    with `multi_tenant=True`, as the rendezvous "static" and "env://" do, uses this one.

    Args:
        address: where the ranks look for the store.
        port: the port.

    Returns:
        What keeps the store open; None where the address is not the loopback, or the port is in use: torch
        then says so, or finds the store that this process has opened before.
    """
    if address not in LOOPBACK:
        return None
    listener = socket.socket(LOOPBACK[address], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = str(listener.getsockname()[0])
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, "lo" on Linux; None where there is none that is up."""
    import psutil

    up = psutil.net_if_stats()
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if name in up and up[name].isup and any(address.address == "127.0.0.1" for address in addresses)
        ),
        None,
    )


PATIENCE = 300.0
"""Seconds that machine 0 may come later than the others."""
PAUSE = 0.5
ATTEMPT = 5.0
SAID_AFTER = 5.0
CONNECTING = ("static", "c10d")
"""Rendezvous backends at a port of machine 0."""

NOT_YET = (errno.ECONNREFUSED, errno.ECONNRESET)
"""The machine answers, and nothing listens there yet: machine 0 was not started, or later."""


def check_reach(
    plan: LaunchPlan, say: Callable[[str], None], *, patience: float = PATIENCE, pause: float = PAUSE
) -> None:
    """Find out in seconds what a rendezvous would find out in many minutes.

    Machine 0 opens the port, so there only the name of its address is looked up. The others connect; while
    machine 0 has not started yet, they wait for it, and say so.

    Args:
        plan: of several machines; with one there is nothing to check.
        say: tells the user.
        patience: seconds to wait for machine 0.
        pause: seconds between two attempts.

    Raises:
        LaunchError: the address has no meaning here, or cannot be reached.
    """
    if plan.machines == 1:
        return
    _look_up(plan)
    if plan.machine == 0 or plan.rendezvous.backend not in CONNECTING:
        return
    deadline = time.monotonic() + patience
    said_at = time.monotonic() + SAID_AFTER
    while (problem := _connect(plan)) is not None:
        now = time.monotonic()
        if problem.errno not in NOT_YET or now > deadline:
            raise _unreachable(plan, problem)
        if now > said_at:
            say(f"{_who(plan)} waits for machine 0 at {_place(plan)}: {_reason(problem)}")
            said_at = deadline + PAUSE
        time.sleep(pause)


def _look_up(plan: LaunchPlan) -> None:
    rendezvous = plan.rendezvous
    try:
        socket.getaddrinfo(rendezvous.address, rendezvous.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unreachable(plan, error) from error


def _connect(plan: LaunchPlan) -> OSError | None:
    rendezvous = plan.rendezvous
    try:
        socket.create_connection((rendezvous.address, rendezvous.port), timeout=ATTEMPT).close()
    except OSError as error:
        return error
    return None


def _unreachable(plan: LaunchPlan, error: OSError) -> LaunchError:
    return LaunchError(
        f"{_who(plan)} cannot reach {_place(plan)}: {_reason(error)}. Check that --main_process_ip is the "
        f"address of machine 0, that `accelerate launch` runs there, and that no firewall is between."
    )


def _who(plan: LaunchPlan) -> str:
    return f"machine {plan.machine} ({plan.ranks})"


def _place(plan: LaunchPlan) -> str:
    return f"{plan.rendezvous.address}:{plan.rendezvous.port}"


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "this name has no address"
    if isinstance(error, TimeoutError):
        return f"no answer within {ATTEMPT:.0f} s"
    return (error.strerror or str(error)).lower()
