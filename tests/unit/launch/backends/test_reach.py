"""Machines that can be reached before the rendezvous, or not."""

from __future__ import annotations

import errno
import socket
import threading
import time
from dataclasses import replace

import pytest

from accelerate.base import LaunchError, patch_environment
from accelerate.launch import LaunchPlan, Target, get_free_port
from accelerate.launch.backends import elastic
from accelerate.launch.backends.elastic import check_reach

PLAN = LaunchPlan("elastic", Target("script", "a.py"), processes=4, machines=2, machine=1)


def at(address: str, port: int, *, machine: int = 1, processes: int = 4) -> LaunchPlan:
    return replace(PLAN, machine=machine, processes=processes, address=address, port=port)


def test_a_machine_that_listens_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        said: list[str] = []
        check_reach(at("127.0.0.1", server.getsockname()[1]), said.append)
    assert said == []


@pytest.mark.parametrize(("processes", "who"), [(2, "rank 1"), (4, "ranks 2 to 3")])
def test_an_error_names_a_machine_that_does_not_listen(processes: int, who: str) -> None:
    port = get_free_port()
    plan = at("127.0.0.1", port, processes=processes)
    with pytest.raises(LaunchError) as caught:
        check_reach(plan, print, timeout=0.05, pause=0.01)
    begin = f"machine 1 ({who}) cannot reach 127.0.0.1:{port}: connection refused. Check that"
    assert str(caught.value).startswith(begin)


def test_a_name_without_an_address_is_refused_on_every_machine() -> None:
    for machine in (0, 1):
        with pytest.raises(LaunchError, match="cannot reach nowhere.invalid:5: this name has no address"):
            check_reach(at("nowhere.invalid", 5, machine=machine), print)


def test_a_pod_waits_until_the_name_of_machine_0_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[OSError | None] = [
        socket.gaierror("no address"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        None,
    ]
    monkeypatch.setattr(elastic, "_connect", lambda *_: answers.pop(0))
    with patch_environment(KUBERNETES_SERVICE_HOST="10.96.0.1"):
        check_reach(at("train-0.train", 5), print, pause=0)
    assert answers == []
    with (
        patch_environment(KUBERNETES_SERVICE_HOST="10.96.0.1"),
        pytest.raises(LaunchError, match="this name has no address"),
    ):
        answers += [socket.gaierror("no address")] * 1000
        check_reach(at("train-0.train", 5), print, timeout=0.01, pause=0.01)


def test_a_connection_that_times_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def silence(*args: object, **kwargs: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(elastic.socket, "create_connection", silence)
    with pytest.raises(LaunchError, match="no answer within 5 s"):
        check_reach(at("127.0.0.1", 5), print)


def test_a_machine_waits_for_the_first_and_prints_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    port = get_free_port()
    said: list[str] = []
    servers: list[socket.socket] = []

    def open_later() -> None:
        while not said:
            time.sleep(0.01)
        servers.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr(elastic, "REPORT_AFTER", 0.05)
    opener = threading.Thread(target=open_later)
    opener.start()
    check_reach(at("127.0.0.1", port), said.append, timeout=20, pause=0.02)
    opener.join()
    servers[0].close()
    assert said == [f"machine 1 (ranks 2 to 3) waits for machine 0 at 127.0.0.1:{port}: connection refused"]


@pytest.mark.parametrize("plan", [replace(PLAN, machines=1, machine=0), at("127.0.0.1", 1, machine=0)])
def test_the_machine_that_opens_the_port_does_not_connect(plan: LaunchPlan) -> None:
    check_reach(plan, print, timeout=0)
