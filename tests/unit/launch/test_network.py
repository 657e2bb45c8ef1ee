"""Ports, the store on the loopback interface, and machines that can be reached or not."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import psutil
import pytest

from accelerate.base import LaunchError
from accelerate.launch import (
    KEY_VARIABLE,
    LaunchPlan,
    Rendezvous,
    Target,
    check_reach,
    get_free_port,
    hold_loopback_store,
    is_port_in_use,
    loopback_interface,
    network,
    run_key,
)


def test_a_port_that_somebody_listens_on_is_in_use() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert is_port_in_use(server.getsockname()[1])
        assert is_port_in_use(str(server.getsockname()[1]))


def test_a_free_port_is_not() -> None:
    assert not is_port_in_use(get_free_port())


def test_each_run_has_a_key_of_its_own_or_that_of_its_launcher() -> None:
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
    from torch.distributed import TCPStore

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


PLAN = LaunchPlan("elastic", Target("script", "a.py"), processes=4, machines=2, machine=1)


def at(address: str, port: int, *, machine: int = 1, processes: int = 4) -> LaunchPlan:
    return replace(
        PLAN, machine=machine, processes=processes, rendezvous=Rendezvous(address=address, port=port)
    )


def test_a_machine_that_listens_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        said: list[str] = []
        check_reach(at("127.0.0.1", server.getsockname()[1]), said.append)
    assert said == []


@pytest.mark.parametrize(("processes", "who"), [(2, "rank 1"), (4, "ranks 2 to 3")])
def test_a_machine_that_never_listens_is_named(processes: int, who: str) -> None:
    port = get_free_port()
    plan = at("127.0.0.1", port, processes=processes)
    with pytest.raises(LaunchError) as caught:
        check_reach(plan, print, patience=0.05, pause=0.01)
    begin = f"machine 1 ({who}) cannot reach 127.0.0.1:{port}: connection refused. Check that"
    assert str(caught.value).startswith(begin)


def test_a_name_without_an_address_is_refused_on_every_machine() -> None:
    for machine in (0, 1):
        with pytest.raises(LaunchError, match="cannot reach nowhere.invalid:5: this name has no address"):
            check_reach(at("nowhere.invalid", 5, machine=machine), print)


def test_no_answer_is_told_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def silence(*args: object, **kwargs: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(network.socket, "create_connection", silence)
    with pytest.raises(LaunchError, match="no answer within 5 s"):
        check_reach(at("127.0.0.1", 5), print)


def test_a_machine_waits_for_the_first_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    port = get_free_port()
    said: list[str] = []
    servers: list[socket.socket] = []

    def open_later() -> None:
        while not said:
            time.sleep(0.01)
        servers.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr(network, "SAID_AFTER", 0.05)
    opener = threading.Thread(target=open_later)
    opener.start()
    check_reach(at("127.0.0.1", port), said.append, patience=20, pause=0.02)
    opener.join()
    servers[0].close()
    assert said == [f"machine 1 (ranks 2 to 3) waits for machine 0 at 127.0.0.1:{port}: connection refused"]


@pytest.mark.parametrize("plan", [replace(PLAN, machines=1, machine=0), at("127.0.0.1", 1, machine=0)])
def test_where_the_port_is_opened_nothing_is_connected(plan: LaunchPlan) -> None:
    check_reach(plan, print, patience=0)
