"""TCP connections between rank 0 and the ranks of other nodes, which end with their processes and machines.

A wait through the store does not end when the rank that it waits for dies. The launcher of a node ends its
other ranks, but not those of other nodes. The kernel closes the connection of a process that dies, and
detects the end of a machine by TCP keepalive (RFC 9293, section 3.8.4).
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

from accelerate.state import process_group
from accelerate.state.agreement import StoreChannel
from accelerate.state.environments import Topology
from accelerate.state.shared import services

TIMEOUT = 5.0
"""Seconds that ranks wait for each other to connect. A rank that does not connect is not watched."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds without data until a probe, seconds between probes, and probes without an answer until the end."""
_LENGTH = 48  # bytes of a greeting


class Connections:
    """Connections of rank 0 to ranks of other nodes, or of such a rank to rank 0.

    Args:
        sockets: Connected sockets by rank.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        for connected in self._sockets.values():
            connected.setblocking(False)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # depends on the operating system
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def ended(self) -> list[int]:
        """Returns the connected ranks that have ended, or whose machine does not answer."""
        return [rank for rank, connected in self._sockets.items() if _is_closed(connected)]

    def close(self) -> None:
        for connected in self._sockets.values():
            with suppress(OSError):  # the other side has ended
                connected.shutdown(socket.SHUT_RDWR)  # also if a forked process has the socket
            connected.close()
        self._sockets = {}


def connect_nodes(topology: Topology) -> None:
    """Connects rank 0 with the ranks of other nodes, unless they are connected.

    Called on all ranks. The connections end with the state of the run or the process.
    """
    if services.find(Connections) is not None:
        return
    try:
        channel = process_group.connect_channel("connections", timedelta(seconds=TIMEOUT))
        if channel is None:
            return
        if topology.rank == 0:
            sockets = _accept(topology, channel)
        else:
            address = channel.wait(["address"], TIMEOUT)["address"]
            sockets = {} if address is None or address[0] == topology.node else _connect(topology, address)
    except RuntimeError:  # the watchdog, which connects to the store next, warns of it
        return
    connections = Connections(sockets)
    services.put(Connections, connections, uses_group=True, end=connections.close)


def _accept(topology: Topology, channel: StoreChannel) -> dict[int, socket.socket]:
    """Accepts connections of the ranks of other nodes, which identify themselves by a token of the store."""
    token, sockets = uuid4().hex, dict[int, socket.socket]()
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    dualstack = family == socket.AF_INET6
    with socket.create_server(
        ("", 0), family=family, dualstack_ipv6=dualstack, backlog=topology.size
    ) as server:
        hosts = [str(topology.address), socket.gethostname()]
        channel.post("address", [topology.node, hosts, server.getsockname()[1], token])
        end = time.monotonic() + TIMEOUT
        while len(sockets) < topology.size - topology.local_size and (left := end - time.monotonic()) > 0:
            if not select.select([server], [], [], left)[0]:
                break
            connected = server.accept()[0]
            connected.settimeout(max(left, 0.1))
            with suppress(OSError, ValueError):  # of another program
                received, _, rank = connected.recv(_LENGTH, socket.MSG_WAITALL).decode().partition("/")
                if received == token:
                    connected.sendall(token.encode())
                    sockets[int(rank)] = connected
                    continue
            connected.close()
    return sockets


def _connect(topology: Topology, address: list[Any]) -> dict[int, socket.socket]:
    _, hosts, port, token = address
    for host in hosts:
        with suppress(OSError, ValueError):  # an address of another machine, or none
            connected = socket.create_connection((host, port), timeout=TIMEOUT / 2)
            connected.sendall(f"{token}/{topology.rank}".ljust(_LENGTH).encode())
            if connected.recv(len(token), socket.MSG_WAITALL).decode() == token:
                return {0: connected}
            connected.close()
    return {}


def _is_closed(connected: socket.socket) -> bool:
    try:
        return connected.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:  # reset, or no answer to the probes
        return True
