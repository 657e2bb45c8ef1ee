"""The process group on one process; with several it is tested in tests/distributed."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator, InitProcessGroupKwargs, torch_private
from accelerate.base import ConfigurationError
from accelerate.devices import hardware_table
from accelerate.state import PartialState, Topology, process_group, services

pytestmark = pytest.mark.usefixtures("states")


def test_a_group_of_one_needs_no_port_and_no_variables() -> None:
    assert not process_group.is_open()
    assert process_group.open_group(Topology(), hardware_table.CPU) == "gloo"
    assert process_group.is_open()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1, 1]
    process_group.wait(torch.device("cpu"))
    process_group.close_group()
    assert not process_group.is_open()
    process_group.close_group()


def test_a_timeout_is_set_in_an_open_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeout() -> timedelta:
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]

    seconds = timedelta(seconds=1)
    process_group.open_group(Topology(), hardware_table.CPU, timeout=10 * seconds)
    PartialState(cpu=True, timeout=20 * seconds)
    assert timeout() == 20 * seconds
    PartialState(timeout=30 * seconds)
    assert timeout() == 30 * seconds
    for count in (40, 50):  # the second one finds all states
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=count * seconds)])
        assert timeout() == count * seconds
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    PartialState()
    assert timeout() == 50 * seconds

    monkeypatch.delattr(dist, "set_timeout", raising=False)
    monkeypatch.setattr(torch_private, "set_group_timeout", None, raising=False)
    with pytest.warns(UserWarning, match=r"timeout=0:01:00 is not used.*the backend gloo"):
        PartialState(timeout=60 * seconds)
    process_group.close_group()
    PartialState(timeout=70 * seconds)  # there is no group


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python makes its locks anew in a fork")
def test_a_fork_waits_for_threads_of_torch() -> None:
    """The thread runs without the interpreter's lock, as one that drops the tensors of a collective."""
    process_group.open_group(Topology(), hardware_table.CPU)
    begun, done = threading.Event(), threading.Event()

    def run() -> None:
        set_name = 15
        ctypes.CDLL(None).prctl(set_name, b"pt_test")
        data = bytes(1 << 20)
        begun.set()
        hashlib.sha3_512(data).digest()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if done.is_set() else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


@pytest.mark.parametrize("comm", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_library_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch, comm: str) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(ConfigurationError, match="backend='nccl': this build of torch"):
        process_group.open_group(Topology(), hardware_table.CUDA, comm)
    assert not process_group.is_open()


def test_replicas_of_xla_use_the_rendezvous_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []

    class Model:
        rendezvous = met.append

    monkeypatch.setattr(process_group, "import_module", {"torch_xla.core.xla_model": Model}.__getitem__)
    process_group.wait(torch.device("xla"))
    assert met == ["accelerate.wait_for_everyone"]


def test_a_backend_library_outside_of_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(process_group, "import_module", imported.append)
    standard = "torch.distributed.nn.functional"
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(dist, "init_process_group", lambda comm, **arguments: None)
    monkeypatch.setattr(services, "own_group", lambda: None)
    process_group.open_group(Topology(), hardware_table.CUDA, "smddp")
    process_group.open_group(Topology(), hardware_table.HPU)
    process_group.open_group(Topology(), hardware_table.CUDA)
    assert imported.count(standard) == 3
    assert [name for name in imported if name != standard] == [
        "smdistributed.dataparallel.torch.torch_smddp",
        "habana_frameworks.torch.distributed.hccl",
    ]


def test_only_the_process_that_opened_it_closes_it_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    process_group.open_group(Topology(), hardware_table.CPU)
    monkeypatch.setattr(services, "group_owner", 1)
    process_group._close_at_exit()
    assert process_group.is_open()
    services.own_group()
    process_group._close_at_exit()
    assert not process_group.is_open()


def test_closing_waits_until_threads_of_torch_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is deleted next may hold the last reference to the group, and wait for them."""
    waited: list[float] = []
    states = iter([False, True, True, *[False] * process_group.IDLE_POLLS])
    monkeypatch.setattr(process_group, "_torch_threads_run", lambda: next(states))
    monkeypatch.setattr(process_group.time, "sleep", waited.append)
    process_group.close_group()
    assert waited == []
    process_group.open_group(Topology(), hardware_table.CPU)
    process_group.close_group()
    assert len(waited) == 3 + process_group.IDLE_POLLS


def test_closing_waits_for_threads_that_stay_busy_no_longer_than_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: next(moments) / 4, sleep=lambda _: None)
    monkeypatch.setattr(process_group, "time", clock)
    monkeypatch.setattr(process_group, "_torch_threads_run", lambda: True)
    process_group._wait_for_threads()
    assert next(moments) == 5  # the clock was read at 0, 0.25, ... and 1 s


def test_a_thread_that_waits_for_the_interpreter_gets_it_before_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a thread sleeps and looks idle: each look comes after a pause, which lets it run."""
    calls: list[str] = []
    states = iter([False, True, False, False])

    def look() -> bool:
        calls.append("look")
        return next(states)

    monkeypatch.setattr(process_group, "_torch_threads_run", look)
    monkeypatch.setattr(process_group.time, "sleep", lambda _: calls.append("pause"))
    process_group._wait_before_fork()
    assert calls == []  # there is no group
    process_group.open_group(Topology(), hardware_table.CPU)
    process_group._wait_before_fork()
    monkeypatch.undo()
    process_group.close_group()
    assert calls == ["pause", "look"] * 4


@pytest.mark.parametrize("close", [process_group.close_group, process_group._close_at_exit])
def test_a_group_is_deleted_after_its_threads_are_idle(
    close: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion waits for threads of gloo, which need the interpreter to delete their tensors."""
    process_group.open_group(Topology(), hardware_table.CPU)
    is_there: list[bool] = []
    group = weakref.ref(dist.group.WORLD)
    monkeypatch.setattr(process_group.time, "sleep", lambda _: is_there.append(group() is not None))
    close()
    assert len(is_there) >= process_group.IDLE_POLLS  # and more while a thread is not idle yet
    assert all(is_there)
    assert group() is None


@pytest.mark.parametrize(
    ("variables", "local", "expected"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}, 2, "generation_2/key"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}, 2, None),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": "2"}, 2, None),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
            1,
            "generation_met/key",
        ),
        ({}, 2, None),
    ],
    ids=["restarted", "first generation", "no agent's store", "several machines", "no agent"],
)
def test_restarted_ranks_do_not_read_keys_of_earlier_generations(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], local: int, expected: str | None
) -> None:
    """The agent keeps its store; the addresses of ended processes in it made the new ones wait."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        process_group, "agree_on_generation", lambda *_: "met"
    )  # agents of several machines count on their own
    opened: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda comm, **arguments: opened.update(arguments))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(services, "own_group", lambda: None)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "set by the agent")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    topology = Topology(size=2, local_size=local, address="127.0.0.1", port=agent.port)
    process_group.open_group(topology, hardware_table.CPU)
    assert ("store" in opened) == (expected is not None)
    if expected is not None:
        opened["store"].set("key", "of this life")
        assert agent.get(expected) == b"of this life"


def test_a_store_is_connected_before_the_group_is_open_once_rank_0_listens() -> None:
    patience = timedelta(seconds=5)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound, without listening
        unreachable = Topology(1, 2, address="127.0.0.1", port=holder.getsockname()[1])
        assert process_group.connect_before(unreachable, "test", patience) is None
    store = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    somebody = Topology(1, 2, address="127.0.0.1", port=store.port)
    first = process_group.connect_before(somebody, "test", patience)
    second = process_group.connect_before(somebody, "test", patience)
    assert first is not None
    assert second is not None
    first.post("word", [1])
    # The store may answer this connection before it has the value of the other.
    assert second.wait(["word"], 20.0) == {"word": [1]}


def test_several_ranks_open_their_group_within_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Watch:
        def __enter__(self) -> None:
            seen.append("entered")

        def __exit__(self, kind: Any, *_: object) -> None:
            seen.append(kind)

    def watch(topology: Topology, opened: int) -> Any:
        seen.append(topology.rank)
        return Watch()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError("no rank came")

    monkeypatch.setattr(services, "while_opening", [watch])
    monkeypatch.setattr(dist, "init_process_group", fail)
    several = Topology(1, 2, 1, 2, address="127.0.0.1", port=1)
    for name, text in several.variables().items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for topology in (several, Topology()):
        with pytest.raises(TimeoutError):
            process_group.open_group(topology, hardware_table.CPU)
    assert seen == [1, "entered", TimeoutError]
