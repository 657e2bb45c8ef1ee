from __future__ import annotations

import socket

from accelerate.launch import get_free_port, is_port_in_use


def test_a_port_that_somebody_listens_on_is_in_use() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert is_port_in_use(server.getsockname()[1])
        assert is_port_in_use(str(server.getsockname()[1]))


def test_a_free_port_is_not() -> None:
    assert not is_port_in_use(get_free_port())
