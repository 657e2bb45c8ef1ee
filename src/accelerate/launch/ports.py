"""Free and busy ports of this machine."""

from __future__ import annotations

import socket

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
