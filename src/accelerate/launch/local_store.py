"""What a run on one machine uses: a key for its ranks, and a store on the loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

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
            if name in up and up[name].isup and any(each.address == "127.0.0.1" for each in addresses)
        ),
        None,
    )
