"""What a look at this machine gives, its ports, and the store on its loopback interface."""

from __future__ import annotations

import socket

import psutil
import pytest
from torch.distributed import TCPStore

from accelerate.devices import CPU
from accelerate.launch import (
    KEY_VARIABLE,
    get_free_port,
    hold_loopback_store,
    is_port_in_use,
    look,
    loopback_interface,
    run_key,
)


def test_with_cpu_no_devices_are_probed() -> None:
    here = look({}, cpu=True)
    assert here.hardware is CPU
    assert here.devices == 1
    assert here.cores >= 1
    assert not here.has_accelerator


def test_a_port_with_a_listener_is_in_use() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert is_port_in_use(server.getsockname()[1])
        assert is_port_in_use(str(server.getsockname()[1]))


def test_a_free_port_is_not() -> None:
    assert not is_port_in_use(get_free_port())


def test_each_run_has_a_new_key_or_that_of_its_launcher() -> None:
    keys = {run_key({})[KEY_VARIABLE] for _ in range(10)}
    assert len(keys) == 10
    assert {len(key) for key in keys} == {64}
    assert run_key({KEY_VARIABLE: "given"}) == {KEY_VARIABLE: "given"}


def listening(port: int) -> set[str]:
    """The addresses on which this process listens at a port."""
    return {
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_listens_on_the_loopback_alone_and_torch_uses_it(address: str, port: int) -> None:
    held = hold_loopback_store(address, port)
    assert listening(port) == {"127.0.0.1"}
    store = TCPStore("127.0.0.1", port, 1, True, multi_tenant=True)
    del held
    store.set("name", "value")
    assert TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).get("name") == b"value"
    assert listening(port) == {"127.0.0.1"}


def test_other_addresses_and_used_ports_are_left_to_torch(port: int) -> None:
    assert hold_loopback_store("host.example", port) is None
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert hold_loopback_store("127.0.0.1", port) is None


def test_the_loopback_interface_has_the_loopback_address() -> None:
    name = loopback_interface()
    assert name is not None
    assert "127.0.0.1" in {each.address for each in psutil.net_if_addrs()[name]}
